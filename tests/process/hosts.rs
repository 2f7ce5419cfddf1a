//! Training over two hosts, simulated by network namespaces where the machine allows them.

#![cfg(target_os = "linux")]

use crate::processes::{command, port};
use assert_cmd::cargo::cargo_bin;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Two namespaces with a virtual cable; removed on drop.
struct Hosts {
    names: [String; 2],
}

fn ip(arguments: &str) -> bool {
    let quiet = Command::new("ip").args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

impl Hosts {
    fn open() -> Option<Hosts> {
        // Tests of one process run at the same time.
        static OPENED: AtomicU32 = AtomicU32::new(0);
        let suffix = format!("{}n{}", std::process::id() % 10_000, OPENED.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b"].map(|host| format!("pipec{suffix}{host}"));
        let hosts = Hosts { names };
        let [a, b] = &hosts.names;
        let commands = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add v{a} netns {a} type veth peer name v{b} netns {b}"),
            format!("-n {a} addr add 10.77.0.1/24 dev v{a}"),
            format!("-n {b} addr add 10.77.0.2/24 dev v{b}"),
            format!("-n {a} link set v{a} up"),
            format!("-n {b} link set v{b} up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ];
        commands.iter().all(|step| ip(step)).then_some(hosts)
    }

    /// Shapes what a host sends.
    fn shape(&self, host: usize, discipline: &str) -> bool {
        let name = &self.names[host];
        let arguments = format!("-n {name} qdisc add dev v{name} root {discipline}");
        let quiet = Command::new("tc").args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok_and(|status| status.success())
    }

    fn start(&self, folder: &Path, host: usize, extra: &[&str]) -> Child {
        let flags = ["--synthetic-data", "--batch", "256", "--stages", "1,2", "--hosts", "hosts.toml", "-q"];
        self.spawn(folder, host, &[&["train", "m.onnx"][..], &flags, extra].concat())
    }

    fn spawn(&self, folder: &Path, host: usize, arguments: &[&str]) -> Child {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(cargo_bin("pipec")).args(arguments);
        command.env("PIPEC_RUN_TOKEN", "a token of the tests").current_dir(folder);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
    }
}

fn wait_for_exit(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A cluster of two hosts with one and two devices.
fn cluster_file(addresses: [&str; 2]) -> String {
    let [first, second] = addresses;
    format!(
        "schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n[[level]]\nname = \"lan\"\ncount = 3\nbandwidth = \"1GB/s\"\n\
         latency = \"10us\"\n[[host]]\naddress = \"{first}\"\ndevices = 1\n[[host]]\naddress = \"{second}\"\ndevices = 2\n"
    )
}

#[test]
fn the_bench_measures_between_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let addresses = [port(), port()].map(|port| format!("127.0.0.1:{port}"));
    fs::write(folder.path().join("hosts.toml"), cluster_file(addresses.each_ref().map(String::as_str))).unwrap();
    let bench = |host: &str| {
        command(folder.path(), &["cluster", "bench", "hosts.toml", "--host", host, "--format", "json"]).spawn().unwrap()
    };
    let [first, second] = ["0", "1"].map(bench).map(|child| child.wait_with_output().unwrap());
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.success() && message.contains("the results are on the first host"), "{message}");
    let value: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    let links = value["host_links"].as_array().unwrap();
    let slowest = links.iter().map(|link| link["bytes_per_s"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    assert_eq!((links.len(), value["measured"]["levels"][0]["bandwidth"].as_f64()), (2, Some(slowest)), "{value}");
}

#[test]
fn a_slow_network_is_measured_as_slow() {
    let Some(hosts) = open_hosts() else { return };
    let limit = |host, rate: &str| hosts.shape(host, &format!("tbf rate {rate} burst 64kb latency 50ms"));
    if !(limit(0, "400mbit") && limit(1, "200mbit")) {
        println!("skipped: tc cannot limit the rate of a link");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts.toml"), cluster_file(["10.77.0.1:4100", "10.77.0.2:4100"])).unwrap();
    let both =
        [0, 1].map(|host| hosts.spawn(folder.path(), host, &["cluster", "bench", "hosts.toml", "--format", "json"]));
    let [first, _] = both.map(|child| child.wait_with_output().unwrap());
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let value: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    let rate = |index: usize| value["host_links"][index]["bytes_per_s"].as_f64().unwrap();
    println!("links of 50 and 25 MB/s: {:.1} and {:.1} MB/s", rate(0) / 1e6, rate(1) / 1e6);
    // A busy machine may be slower than its links.
    assert!((1e6..53e6).contains(&rate(0)) && (1e6..27e6).contains(&rate(1)), "{value}");
}

/// Two hosts, or the reason why not on standard output.
fn open_hosts() -> Option<Hosts> {
    let hosts = Hosts::open();
    if hosts.is_none() {
        println!("skipped: this machine does not allow network namespaces");
    }
    hosts
}

fn run_ok(folder: &Path, arguments: &[&str]) {
    let output = Command::new(cargo_bin("pipec")).current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Writes the model and the file of the hosts.
fn prepare(folder: &Path) {
    run_ok(folder, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    fs::write(folder.join("hosts.toml"), cluster_file(["10.77.0.1:4100", "10.77.0.2:4100"])).unwrap();
}

/// One host of the two is killed at a random time, and both start again. `PIPEC_KILLS` sets how often,
/// `PIPEC_SEED` when.
#[test]
fn hosts_that_are_killed_again_and_again_end_as_if_they_never_were() {
    let Some(hosts) = open_hosts() else { return };
    let kills: u64 = std::env::var("PIPEC_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(4);
    if ![0, 1].iter().all(|host| hosts.shape(*host, "netem delay 1ms 1ms")) {
        println!("without delays: tc has no netem here");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    prepare(root);
    let flags = ["--synthetic-data", "--batch", "256", "--stages", "1,2", "--steps", "40", "-q"];
    run_ok(root, &[&["train", "m.onnx"][..], &flags, &["--save", "whole.safetensors"]].concat());
    let extra = ["--steps", "40", "--checkpoint-dir", "ck", "--checkpoint-every", "4", "--keep", "2"];
    let extra = [&extra[..], &["--resume", "auto", "--save", "again.safetensors", "--connect-timeout", "10"]].concat();
    let start = Instant::now();
    let children = [0, 1].map(|host| hosts.start(root, host, &extra));
    children.map(wait_for_exit).iter().for_each(|(code, message)| assert_eq!(*code, Some(0), "{message}"));
    let duration = start.elapsed();
    let read = |name: &str| fs::read(root.join(name)).unwrap();
    assert!(read("again.safetensors") == read("whole.safetensors"));
    fs::remove_dir_all(root.join("ck")).unwrap();

    let seed: u64 = std::env::var("PIPEC_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("seed {seed}, {duration:?} without kills");
    let mut late_kills = 0;
    for kill in 0..kills {
        let random = compiler::op::dropout::mix(seed ^ kill << 32);
        let (victim, share) = ((random % 2) as usize, (random >> 8) % 1000);
        let mut children = [0, 1].map(|host| hosts.start(root, host, &extra));
        thread::sleep(duration.mul_f64(share as f64 / 1000.0));
        children[victim].kill().unwrap();
        let start = Instant::now();
        let outcomes = children.map(wait_for_exit);
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        let (code, message) = &outcomes[1 - victim];
        assert!(matches!(code, Some(0 | 1)) && !message.contains("panicked"), "{code:?}: {message}");
        if outcomes.iter().all(|(code, _)| *code == Some(0)) {
            // It came too late.
            late_kills += 1;
            assert!(read("again.safetensors") == read("whole.safetensors"));
            fs::remove_dir_all(root.join("ck")).unwrap();
        }
    }
    println!("{late_kills} of {kills} kills came after the end");
    let children = [0, 1].map(|host| hosts.start(root, host, &extra));
    children.map(wait_for_exit).iter().for_each(|(code, message)| assert_eq!(*code, Some(0), "{message}"));
    assert!(read("again.safetensors") == read("whole.safetensors"));
}

#[test]
fn two_hosts_train_together_and_notice_a_cut_cable() {
    let Some(hosts) = open_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let run_here = |arguments: &[&str]| run_ok(root, arguments);
    prepare(root);
    let flags =
        ["--synthetic-data", "--batch", "256", "--stages", "1,2", "--steps", "6", "--save", "t.safetensors", "-q"];
    run_here(&[&["train", "m.onnx"][..], &flags].concat());
    let extra = ["--steps", "6", "--save", "h.safetensors"];
    let children = [0, 1].map(|host| hosts.start(root, host, &extra));
    for (code, message) in children.map(wait_for_exit) {
        assert_eq!(code, Some(0), "{message}");
    }
    let read = |name: &str| fs::read(root.join(name)).unwrap();
    assert!(read("t.safetensors") == read("h.safetensors"));

    let extra = ["--steps", "20000", "--metrics", "m.jsonl"];
    let children = [0, 1].map(|host| hosts.start(root, host, &extra));
    let until = Instant::now() + Duration::from_secs(60);
    while fs::metadata(root.join("m.jsonl")).map_or(0, |file| file.len()) == 0 {
        assert!(Instant::now() < until, "it does not train");
        thread::sleep(Duration::from_millis(20));
    }
    let name = &hosts.names[0];
    assert!(ip(&format!("-n {name} link set v{name} down")));
    let cut_time = Instant::now();
    let message = children.map(wait_for_exit);
    assert!(cut_time.elapsed() < Duration::from_secs(30), "{:?}", cut_time.elapsed());
    let peers = ["rank 1 (workers 1.0, 1.1 of stage 1), process ", "rank 0 (worker 0.0 of stage 0), process "];
    for ((code, message), peer) in message.iter().zip(peers) {
        assert_eq!(*code, Some(1), "{message}");
        assert!(message.contains(peer) && message.contains("has sent nothing for 5"), "{message}");
    }
}
