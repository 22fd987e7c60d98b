//! Every state of a session × every answer of the manager, by enumeration: what must hold after each of them.
//!
//! The rules are few and the same for every cell. The client hears an end in time; no success is invented; then either
//! the supervisor lives, its one slot is free again and no unit is left, or it is down with exit 1, having said why
//! (and `BindsTo=` takes the units down with it).

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use opencode_pty::frame::message::{ErrorCode, Exit};
use support::fake_manager::{Answer, JobEnd, Launcher, Stopping};
use support::peer::{Frame, Peer, Transcript};

use crate::scene::{LONG, SERVER_UNIT, Scene};

/// Where a session is when the manager's answer matters, by the call that is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The peer's unit is asked for.
    Identify,
    /// The server's unit is read, for the first or the second check.
    ServerRead,
    /// The unit is asked for.
    StartCall,
    /// The unit is read while the launcher answers.
    UnitRead,
    /// The unit of a running session is stopped at the client's wish.
    StopCall,
    /// The unit is read while it is being stopped.
    StopRead,
    /// The unit is let go after a stop.
    Release,
    /// The unit is read after it ended by itself.
    EndRead,
    /// The unit that no stop ends is killed.
    KillCall,
    /// The unit of a start that failed is stopped.
    StopAfterFailedStart,
}

const STATES: [State; 10] = [
    State::Identify,
    State::ServerRead,
    State::StartCall,
    State::UnitRead,
    State::StopCall,
    State::StopRead,
    State::Release,
    State::EndRead,
    State::KillCall,
    State::StopAfterFailedStart,
];

/// What the call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    Error,
    /// The bus says that the manager did not answer it.
    Timeout,
    Silence,
    LostReply,
    Malformed,
    /// The unit is gone all at once, without a signal, and every call about it says so.
    Vanished,
    /// Carried out and answered after the caller has given it up.
    Late,
    /// The bus goes away instead, and comes back.
    BusCloses,
}

const GIVEN: [Given; 8] = [
    Given::Error,
    Given::Timeout,
    Given::Silence,
    Given::LostReply,
    Given::Malformed,
    Given::Vanished,
    Given::Late,
    Given::BusCloses,
];

/// Longer than one call may take (5 s), so that an answer is late.
const LATE: Duration = Duration::from_millis(5_500);
/// Longer than the longest: a minute for a manager that is silent, and all over again for its last word.
const ALL: Duration = Duration::from_mins(3);
/// How the command of these sessions ends by itself.
const ENDING: (i32, i32, &str) = (1, 7, "exit-code");

impl Given {
    fn answer(self) -> Option<Answer> {
        Some(match self {
            Self::Error => Answer::Error("org.freedesktop.DBus.Error.Failed", "no"),
            Self::Timeout => Answer::Error("org.freedesktop.DBus.Error.NoReply", "no reply"),
            Self::Silence => Answer::Silence,
            Self::LostReply => Answer::LostReply,
            Self::Malformed => Answer::Malformed,
            Self::Late => Answer::Held,
            Self::Vanished | Self::BusCloses => return None,
        })
    }
}

impl State {
    /// The call, and whether it is about the session's unit (whose name is known only once it has been asked for).
    fn call(self) -> (&'static str, bool) {
        match self {
            Self::Identify => ("GetUnitByPIDFD", false),
            Self::ServerRead => ("GetAll", false),
            Self::StartCall => ("StartTransientUnit", false),
            Self::UnitRead | Self::StopRead | Self::EndRead => ("GetAll", true),
            Self::StopCall | Self::StopAfterFailedStart => ("StopUnit", true),
            Self::Release => ("UnrefUnit", true),
            Self::KillCall => ("KillUnit", true),
        }
    }
}

/// Makes the manager answer so, from the next such call on.
fn arrange(scene: &mut Scene, state: State, given: Given, times: usize, unit: Option<&str>) {
    let (method, _) = state.call();
    match (given.answer(), unit) {
        (Some(answer), Some(unit)) => scene.fake.answer_for(method, unit, answer, times),
        (Some(answer), None) if state == State::ServerRead => {
            scene.fake.answer_for(method, SERVER_UNIT, answer, times);
        }
        (Some(answer), None) => scene.fake.answer(method, answer, times),
        (None, Some(unit)) if given == Given::Vanished => scene.fake.vanish(unit),
        (None, None) if given == Given::Vanished => {}
        (None, _) => scene.bus.stop().unwrap(),
    }
}

/// Lets time pass or brings the bus back, where the answer is about that.
fn resolve(scene: &mut Scene, given: Given) {
    match given {
        Given::Late => {
            thread::sleep(LATE);
            scene.fake.with(|state| state.script.answers.clear());
            scene.fake.release();
        }
        Given::BusCloses => {
            scene.bus.resume().unwrap();
            scene.fake.lose_references();
            scene.fake.connect().unwrap();
        }
        _ => {}
    }
}

/// Brings a session to the state, has the manager answer, and gives what the client heard.
fn play(scene: &mut Scene, state: State, given: Given, times: usize) -> Transcript {
    let (_, about_the_unit) = state.call();
    if !about_the_unit {
        arrange(scene, state, given, times, None);
        let peer = scene.peer();
        // The supervisor may close before it has read the frame.
        let _ = peer.start_in(scene.directory(), 60, &["/bin/true"]);
        resolve(scene, given);
        return heard(peer);
    }
    scene.fake.with(|script| {
        script.script.job = JobEnd::Held;
        script.script.launcher = Launcher::Echo;
    });
    let mut peer = scene.asked();
    let name = scene.fake.wait_for_start(&[]);
    match state {
        State::UnitRead => {
            arrange(scene, state, given, times, Some(&name));
            if given == Given::BusCloses {
                resolve(scene, given);
            }
            scene.fake.finish_job(&name, "done");
        }
        State::StopAfterFailedStart => {
            arrange(scene, state, given, times, Some(&name));
            if given == Given::BusCloses {
                resolve(scene, given);
            }
            scene.fake.finish_job(&name, "failed");
        }
        _ => {
            scene.fake.finish_job(&name, "done");
            peer.started(LONG).unwrap();
            if state == State::KillCall {
                scene.fake.with(|script| script.script.stop = Stopping::NeedsKill);
            }
            arrange(scene, state, given, times, Some(&name));
            if state == State::EndRead {
                scene.fake.end_unit(&name, ENDING);
            } else {
                peer.stop().unwrap();
            }
        }
    }
    if given != Given::BusCloses || !matches!(state, State::UnitRead | State::StopAfterFailedStart) {
        resolve(scene, given);
    }
    heard(peer)
}

/// What the client hears to the end. A session that runs all the same is stopped: that, too, is an outcome.
fn heard(mut peer: Peer) -> Transcript {
    let mut unit = None;
    let first = match peer.next_frame(ALL).unwrap() {
        Frame::Started(name) => {
            unit = Some(name);
            peer.stop().unwrap();
            None
        }
        Frame::Closed => return Transcript::default(),
        other => Some(other),
    };
    let mut transcript = peer.read_to_end(ALL).unwrap();
    match first {
        Some(Frame::Exit(exit)) => transcript.exit = Some(exit),
        Some(Frame::Error(code, message)) => transcript.error = Some((code, message)),
        Some(Frame::Stopped) => transcript.stopped = true,
        _ => transcript.unit = transcript.unit.or(unit),
    }
    transcript
}

/// What must hold after every cell.
fn check(scene: &mut Scene, cell: &str, state: State, transcript: &Transcript) {
    if let Some(exit) = &transcript.exit {
        let real = Exit::new(1, 7, "exit-code").unwrap();
        let allowed = match state {
            State::EndRead => vec![real, Exit::lost()],
            _ => vec![Exit::stopped(), Exit::lost()],
        };
        assert!(allowed.contains(exit), "{cell}: the record is invented: {transcript:?}");
    }
    scene.fake.with(|state| {
        state.script = support::fake_manager::Script::default();
    });
    if transcript.error_code() == Some(ErrorCode::StopFailed) {
        let (status, log) = scene.supervisor().wait();
        assert_eq!(status.code(), Some(1), "{cell}");
        assert!(log.contains("cannot confirm"), "{cell}: {log}");
        return;
    }
    scene.wait_for_a_session();
    assert!(scene.supervisor().is_running(), "{cell}");
    // Its own sessions, and the one that has just shown that the slot is free.
    scene.fake.wait_until_empty();
}

/// Runs all cells, as many at a time as wait for each other's deadlines without getting in each other's way.
fn run(cells: &[(State, Given, usize)]) {
    const AT_A_TIME: usize = 12;
    let next = AtomicUsize::new(0);
    let faults = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(&(state, given, times)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let cell = format!("{state:?} × {given:?} × {times}");
                    let played = std::panic::catch_unwind(|| {
                        let mut scene = Scene::with_sessions_max(1);
                        let transcript = play(&mut scene, state, given, times);
                        check(&mut scene, &cell, state, &transcript);
                    });
                    if played.is_err() {
                        faults.lock().unwrap().push(cell);
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{} of {} cells: {faults:#?}", faults.len(), cells.len());
}

fn cells(times: usize) -> Vec<(State, Given, usize)> {
    STATES
        .into_iter()
        .flat_map(|state| GIVEN.into_iter().map(move |given| (state, given, times)))
        // A bus that closes does so once, as does a unit that vanishes, if there is one.
        .filter(|(_, given, _)| times == 1 || !matches!(given, Given::BusCloses | Given::Vanished))
        .filter(|(state, given, _)| *given != Given::Vanished || state.call().1)
        .collect()
}

#[test]
fn after_every_answer_that_comes_once_nothing_is_unaccounted_for() {
    run(&cells(1));
}

#[test]
fn after_every_answer_that_comes_for_good_nothing_is_unaccounted_for() {
    run(&cells(usize::MAX));
}
