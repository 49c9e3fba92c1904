//! Inside a rank: dying with the launcher, and telling it what went wrong.

use super::{
    blame::Blame,
    env,
    report::{Kind, Record},
};
use crate::notice::HELP;
use std::{
    any::Any,
    cell::RefCell,
    fmt::Display,
    fs::File,
    panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, PoisonError},
};

/// How a rank tells its own failures from the consequences of another rank's.
pub(super) struct Classify<'a, E> {
    pub(super) error: &'a dyn Fn(&E) -> Blame,
    pub(super) panic: ReadPayload,
}

/// What a panic payload says, if it is one that the reader knows.
pub(super) type ReadPayload =
    Arc<dyn Fn(&(dyn Any + Send)) -> Option<(String, Blame)> + Send + Sync>;

thread_local! {
    /// The last panic that has begun on this thread.
    static LAST_PANIC: RefCell<Option<Record>> = const { RefCell::new(None) };
    /// Whom to tell, while this thread runs the training function.
    static LISTENER: RefCell<Option<(Reporter, ReadPayload)>> = const { RefCell::new(None) };
}

/// How the training function of a rank ended.
pub(super) enum Ended<E> {
    Well,
    /// With an error; whether the launcher knows it.
    Failed {
        error: E,
        reported: bool,
    },
}

impl<E> Ended<E> {
    /// Where no launcher of ours waits for an answer.
    pub(super) fn unreported(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Ended::Well,
            Err(error) => Ended::Failed {
                error,
                reported: false,
            },
        }
    }

    pub(super) fn result(self) -> Result<(), E> {
        match self {
            Ended::Well => Ok(()),
            Ended::Failed { error, .. } => Err(error),
        }
    }
}

/// Runs `body` as a rank.
pub(super) fn run<E: Display>(
    classify: &Classify<'_, E>,
    body: impl FnOnce() -> Result<(), E>,
) -> Ended<E> {
    #[cfg(unix)]
    if !is_own_rank() {
        return Ended::unreported(body());
    }
    #[cfg(unix)]
    follow_launcher();
    let reporter = Reporter::open();
    reporter.hook(classify.panic.clone());
    LISTENER.set(Some((reporter.clone(), classify.panic.clone())));
    let ended = catch_unwind(AssertUnwindSafe(body));
    LISTENER.take();
    match ended {
        Ok(Ok(())) => Ended::Well,
        Ok(Err(error)) => {
            let record = Record::new(Kind::Error, &error.to_string(), (classify.error)(&error));
            let reported = reporter.send(&record);
            Ended::Failed { error, reported }
        }
        Err(payload) => {
            // A payload raised with `resume_unwind` has passed no hook; what the hook saw last is then another panic.
            let (text, _) = message(&*payload, &classify.panic);
            let record = LAST_PANIC
                .take()
                .filter(|seen| seen.text.ends_with(&text))
                .unwrap_or_else(|| describe(&*payload, None, &classify.panic));
            reporter.send(&Record {
                kind: Kind::Panic,
                ..record
            });
            resume_unwind(payload)
        }
    }
}

/// Tells the launcher of a panic that passes no hook; whether it now knows. Only on the thread of the training function, where the
/// panic ends the rank if nothing catches it.
pub(super) fn tell(payload: &(dyn Any + Send)) -> bool {
    LISTENER.with_borrow(|listener| {
        let tell = |(reporter, read): &(Reporter, ReadPayload)| {
            reporter.send(&describe(payload, None, read))
        };
        listener.as_ref().is_some_and(tell)
    })
}

fn describe(payload: &(dyn Any + Send), place: Option<String>, read: &ReadPayload) -> Record {
    let (text, blame) = message(payload, read);
    let text = match (place, read(payload)) {
        (Some(place), _) => format!("panicked at {place}: {text}"),
        // An error that left `backward`, past all hooks, is told like one that was returned.
        (None, Some(_)) => text,
        (None, None) => format!("panicked: {text}"),
    };
    Record::new(Kind::PanicBegun, &text, blame)
}

fn message(payload: &(dyn Any + Send), read: &ReadPayload) -> (String, Blame) {
    let (mut text, blame) = read(payload).unwrap_or_else(|| {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("a value that is not text").to_owned();
        (text, Blame::default())
    });
    // The launcher's report has it at its end, once.
    if text.ends_with(HELP) {
        text.truncate(text.len() - HELP.len());
    }
    (text, blame)
}

/// The rank's end of its report pipe. Reporting is best effort: a rank whose launcher is gone has
/// nobody to tell.
#[derive(Clone)]
struct Reporter(Option<Arc<Mutex<File>>>);

impl Reporter {
    fn open() -> Self {
        let file = env::number(env::REPORT_FD)
            .and_then(|fd| File::options().write(true).open(inherited(fd)).ok());
        Self(file.map(|file| Arc::new(Mutex::new(file))))
    }

    /// Whether the launcher has it.
    fn send(&self, record: &Record) -> bool {
        self.0.as_ref().is_some_and(|file| {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            record.write(&mut *file).is_ok()
        })
    }

    /// Reports each panic as it begins, because the process may not live to see it caught.
    fn hook(&self, read: ReadPayload) {
        let reporter = self.clone();
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            let record = describe(
                info.payload(),
                info.location().map(ToString::to_string),
                &read,
            );
            reporter.send(&record);
            // The thread may be past its thread-locals.
            let _ = LAST_PANIC.try_with(|last| last.replace(Some(record)));
            previous(info);
        }));
    }
}

/// Opens anew what the launcher left open under this number: the way to get at a pipe by its number without
/// taking it from somebody on trust (`from_raw_fd` is unsafe for that reason).
fn inherited(fd: u32) -> String {
    format!("/dev/fd/{fd}")
}

/// Makes sure that this rank and what it has started end with the launcher, even one that was killed.
///
/// The kernel's parent-death signal would end the rank alone and leave its own children behind. So a thread
/// waits for the end of a pipe that only the launcher holds open, and then kills the rank's whole
/// process group. The parent-death signal serves to wake a rank that is stopped.
#[cfg(unix)]
fn follow_launcher() {
    let watcher = env::number(env::LIFELINE_FD)
        .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotFound))
        .and_then(|fd| File::open(inherited(fd)))
        .and_then(|pipe| {
            std::thread::Builder::new()
                .name("launcher-watch".to_owned())
                .spawn(move || {
                    wait_for_end(pipe);
                    kill_group();
                })
        });
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        let signal = if watcher.is_ok() {
            Signal::CONT
        } else {
            Signal::KILL
        };
        let _ = set_parent_process_death_signal(Some(signal));
        // The launcher may have ended before the line above; without a watcher nobody would notice.
        if watcher.is_err() && env::number(env::LAUNCHER_PID) != parent() {
            kill_group();
        }
    }
    if let Err(error) = watcher {
        tracing::warn!(%error, "cannot watch the launcher; processes that this rank starts may outlive it");
    }
}

/// False in a program that a rank has started, which has inherited the variables but whose descriptors mean
/// other things. A rank that the launcher's death has orphaned already is still a rank, and ends in `follow_launcher`.
#[cfg(unix)]
fn is_own_rank() -> bool {
    use rustix::process::{Pid, getppid, test_kill_process};
    let launcher =
        env::number(env::LAUNCHER_PID).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    launcher == getppid() || launcher.is_some_and(|launcher| test_kill_process(launcher).is_err())
}

#[cfg(unix)]
fn wait_for_end(mut pipe: File) {
    use std::io::Read;
    loop {
        match pipe.read(&mut [0]) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // Nothing is ever written to it.
            _ => return,
        }
    }
}

#[cfg(target_os = "linux")]
fn parent() -> Option<u32> {
    rustix::process::getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
}

/// Kills this process and what it has started.
#[cfg(unix)]
fn kill_group() {
    use rustix::process::{Signal, getpgrp, getpid, kill_process, kill_process_group};
    // The launcher made us the leader of a group. If somebody has moved us to another, that one is not ours to kill.
    if getpgrp() == getpid() {
        let _ = kill_process_group(getpgrp(), Signal::KILL);
    }
    let _ = kill_process(getpid(), Signal::KILL);
}
