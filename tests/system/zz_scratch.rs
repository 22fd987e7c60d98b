//! Scratch of the threats helper; not kept.
use crate::fixture::Fixture;
#[test]
fn zz_outsider_stops() {
    let fixture = Fixture::new();
    for command in ["exec sleep 600", "exec cat", "while :; do sleep 1; done"] {
    for verb in ["stop", "stop", "stop", "restart", "restart"] {
        let mut session = fixture.start_sh(&format!("echo ready; {command}"));
        session.line("ready");
        let begun = std::time::Instant::now();
        fixture.root(&format!("systemctl {verb} {}", session.unit));
        let took = begun.elapsed();
        let exit = session.read_to_end().exit.unwrap();
        eprintln!("{command}: {verb}: {exit} after {took:?}, record after {:?}", begun.elapsed());
        fixture.wait_until_gone(&session.unit, crate::fixture::SOON);
    }}
}
