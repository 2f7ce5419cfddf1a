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
use runtime::train::run::{agrees, run_in_group, train};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

fn meet(ready: &Ready, own: usize, door: JoinMode, first: &str) -> Group {
    let training = ready.training(&ready.weights);
    let seats = WorkerPlacement::beside(training.program.workers.len(), 1);
    let lines = seats.lines(training.program, training.codes, agrees(&training));
    let identity = Identity { run: 1, inputs: Vec::new() };
    let wait = Duration::from_secs(30);
    let (first, listen) = (first.to_string(), None);
    let part = ProcessConfig {
        own,
        placement: seats,
        identity,
        token: RunToken::default(),
        first,
        listen,
        connect_timeout: wait,
        deadline: wait,
        nccl: false,
        follows: false,
    };
    join(training.program, &lines, part, door, Arc::new(RunStatus::default()), &|_| {}).unwrap()
}

/// A very slow disk: blocks on its first snapshot until signalled.
fn slow(ready: &Ready, group: Group, goes_on: Receiver<()>) -> Trained {
    let parts = AtomicUsize::new(0);
    let counted = &parts;
    let mut on_part = move |_| {
        if counted.fetch_add(1, Ordering::Relaxed) == 0 {
            let _ = goes_on.recv();
        }
    };
    let course = RunOptions { cuts: Some(ready.cuts()), on_part: Some(&mut on_part), ..RunOptions::default() };
    let trained = run_in_group(&ready.training(&ready.weights), course, &mut |_| {}, Some(group)).unwrap().unwrap();
    assert_eq!(parts.load(Ordering::Relaxed), 24, "every part has come");
    trained
}

#[test]
fn a_slow_disk_holds_up_processes_whose_parts_would_fill_the_memory() {
    let plan = plan(Schedule::OneFOneBRr, &[1, 1], 1);
    let ready = Ready { every: 1, ..ready(&mlp(), plan, momentum(), Policy::default()) };
    let plain = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
    let port = listen("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    let (go, goes_on) = channel::<()>();
    let (progress_sender, began) = channel();
    thread::scope(|scope| {
        let (ready, address) = (&ready, &address);
        let first = scope.spawn(move || slow(ready, meet(ready, 0, JoinMode::Port(port), address), goes_on));
        for own in [1, 2] {
            let progress_sender = progress_sender.clone();
            scope.spawn(move || {
                let group = meet(ready, own, JoinMode::Outside, address);
                progress_sender.send((own - 1, group.progress.clone())).unwrap();
                let course = RunOptions { cuts: Some(ready.cuts()), ..RunOptions::default() };
                assert!(
                    run_in_group(&ready.training(&ready.weights), course, &mut |_| {}, Some(group)).unwrap().is_none()
                );
            });
        }
        let workers = [began.recv().unwrap(), began.recv().unwrap()];
        let at = || workers.each_ref().map(|(worker, progress)| progress[*worker].load(Ordering::Relaxed));
        // The workers come to a halt in the middle of the run.
        let (mut last, mut since) = (at(), Instant::now());
        while since.elapsed() < Duration::from_secs(1) || last.contains(&0) {
            thread::sleep(Duration::from_millis(20));
            if at() != last {
                (last, since) = (at(), Instant::now());
            }
        }
        for (worker, at) in (workers.iter().map(|(worker, _)| *worker)).zip(last) {
            let whole = ready.prepared.program.workers[worker].instructions.len() as u32;
            assert!(at + 1 < whole, "worker {worker} has come to its end while nothing was written: {at} of {whole}");
        }
        drop(go);
        let trained = first.join().unwrap();
        assert_eq!(bits(&trained.losses), bits(&plain.losses));
        assert!(trained.weights == plain.weights);
    });
}
