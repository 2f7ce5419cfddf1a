//! Checkpoints of several processes, run as threads with connections between them.

use crate::ready::{Ready, bits, mlp, momentum, plan, ready};
use compiler::plan::schedule::Schedule;
use runtime::optim::policy::Policy;
use runtime::process::authentication::RunToken;
use runtime::process::handshake::Identity;
use runtime::process::meeting::ProcessConfig;
use runtime::process::placement::WorkerPlacement;
use runtime::process::process_group::{Group, JoinMode, join, listen};
use runtime::process::run_status::RunStatus;
use runtime::train::job::{RunOptions, Trained};
use runtime::train::run::{run_in_group, shares_norm, train};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

fn join_group(ready: &Ready, process: usize, mode: JoinMode, first: &str) -> Group {
    let training = ready.training(&ready.weights);
    let placement = WorkerPlacement::beside(training.program.workers.len(), 1);
    let lines = placement.lines(training.program, training.codes, shares_norm(&training));
    let identity = Identity { run: 1, inputs: Vec::new() };
    let timeout = Duration::from_secs(30);
    let (first_address, listen) = (first.to_string(), None);
    let config = ProcessConfig {
        process,
        placement,
        identity,
        token: RunToken::default(),
        first_address,
        listen,
        connect_timeout: timeout,
        deadline: timeout,
        nccl: false,
        follows: false,
    };
    join(training.program, &lines, config, mode, Arc::new(RunStatus::default()), &|_| {}).unwrap()
}

/// A very slow disk: blocks on its first snapshot until signalled.
fn run_slowly(ready: &Ready, group: Group, resume_signal: Receiver<()>) -> Trained {
    let snapshots = AtomicUsize::new(0);
    let counter = &snapshots;
    let mut on_snapshot = move |_| {
        if counter.fetch_add(1, Ordering::Relaxed) == 0 {
            let _ = resume_signal.recv();
        }
    };
    let options = RunOptions { cuts: Some(ready.cuts()), on_snapshot: Some(&mut on_snapshot), ..RunOptions::default() };
    let trained = run_in_group(&ready.training(&ready.weights), options, &mut |_| {}, Some(group)).unwrap().unwrap();
    assert_eq!(snapshots.load(Ordering::Relaxed), 24, "every part has come");
    trained
}

#[test]
fn a_slow_disk_holds_up_processes_whose_parts_would_fill_the_memory() {
    let plan = plan(Schedule::OneFOneBRr, &[1, 1], 1);
    let ready = Ready { every: 1, ..ready(&mlp(), plan, momentum(), Policy::default()) };
    let undisturbed = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
    let port = listen("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    let (resume_sender, resume_signal) = channel::<()>();
    let (progress_sender, progress_receiver) = channel();
    thread::scope(|scope| {
        let (ready, address) = (&ready, &address);
        let first =
            scope.spawn(move || run_slowly(ready, join_group(ready, 0, JoinMode::Port(port), address), resume_signal));
        for process in [1, 2] {
            let progress_sender = progress_sender.clone();
            scope.spawn(move || {
                let group = join_group(ready, process, JoinMode::Outside, address);
                progress_sender.send((process - 1, group.progress.clone())).unwrap();
                let options = RunOptions { cuts: Some(ready.cuts()), ..RunOptions::default() };
                assert!(
                    run_in_group(&ready.training(&ready.weights), options, &mut |_| {}, Some(group)).unwrap().is_none()
                );
            });
        }
        let workers = [progress_receiver.recv().unwrap(), progress_receiver.recv().unwrap()];
        let instructions_done =
            || workers.each_ref().map(|(worker, progress)| progress[*worker].load(Ordering::Relaxed));
        // The workers come to a halt in the middle of the run.
        let (mut last, mut since) = (instructions_done(), Instant::now());
        while since.elapsed() < Duration::from_secs(1) || last.contains(&0) {
            thread::sleep(Duration::from_millis(20));
            if instructions_done() != last {
                (last, since) = (instructions_done(), Instant::now());
            }
        }
        for (worker, instructions_done) in (workers.iter().map(|(worker, _)| *worker)).zip(last) {
            let total = ready.prepared.program.workers[worker].instructions.len() as u32;
            assert!(
                instructions_done + 1 < total,
                "worker {worker} has come to its end while nothing was written: {instructions_done} of {total}"
            );
        }
        drop(resume_sender);
        let trained = first.join().unwrap();
        assert_eq!(bits(&trained.losses), bits(&undisturbed.losses));
        assert!(trained.weights == undisturbed.weights);
    });
}
