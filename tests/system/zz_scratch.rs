//! Scratch of the threats helper; not kept.
use crate::fixture::Fixture;
#[test]
fn zz_show() {
    let fixture = Fixture::new();
    let mut session = fixture.start_sh("echo ready; read line");
    session.line("ready");
    for unit in [session.unit.as_str(), "opencode-pty-supervisor.service", "opencode-pty.slice"] {
    eprintln!("{}", fixture.root(&format!("systemctl show {unit} | grep -E '^(Type|Slice|User|Group|NoNew|UMask|Kill|Send|Final|Timeout|Runtime|IgnoreS|OOM|Deleg|BindsTo|After|Collect|Std|Standard|Ambient|Capab|Inacc|Tempo|BindRead|Private|Joins|Restrict|Lock|Protect|Keyring|CPU|Memory|Tasks|IO|Exec|Env|Desc|Perpet|NotifyA|Restart|System|Drop|WatchdogU|StartLimitI|Proc|Device|IPAddressD|Limit(NOFILE|CORE)|Nice|Supplem)' | sed 's/^/{}: /'", unit.get(..16).unwrap())));
    }
    eprintln!("{}", fixture.root("P=$(systemctl show -p MainPID --value opencode-pty-supervisor); cat /proc/$P/status /proc/$P/limits /proc/$P/cgroup /proc/$P/oom_score_adj /proc/$P/mountinfo; ls -l /proc/$P/ns /proc/$P/fd; cut -d ' ' -f 19 /proc/$P/stat; ls /proc/$P/task"));
    session.stop_and_read();
}
