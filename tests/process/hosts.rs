//! Training over two hosts, simulated by network namespaces. Creating them needs privileges: `PIPEC_NAMESPACES=1 cargo
//! test --test hosts`.

#![cfg(target_os = "linux")]

use assert_cmd::cargo::cargo_bin;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
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
        let own = std::process::id() % 10_000;
        let names = ["a", "b"].map(|host| format!("pipec{own}{host}"));
        let hosts = Hosts { names };
        let [a, b] = &hosts.names;
        let made = [
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
        made.iter().all(|step| ip(step)).then_some(hosts)
    }

    fn start(&self, folder: &Path, host: usize, more: &[&str]) -> Child {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(cargo_bin("pipec")).args(["train", "m.onnx"]);
        command
            .args(["--synthetic-data", "--batch", "256", "--stages", "1,2", "--hosts", "hosts.toml", "-q"])
            .args(more);
        command.current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
    }
}

fn end(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn two_hosts_train_together_and_notice_a_cut_cable() {
    let is_wanted = std::env::var_os("PIPEC_NAMESPACES").is_some();
    let Some(hosts) = is_wanted.then(Hosts::open).flatten() else {
        println!("skipped: no network namespaces, or PIPEC_NAMESPACES is not set");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let here = |arguments: &[&str]| {
        let output = Command::new(cargo_bin("pipec")).current_dir(at).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    here(&["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let file = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n[[level]]\nname = \"lan\"\ncount = 3\nbandwidth = \"1GB/s\"\n\
                latency = \"10us\"\n[[host]]\naddress = \"10.77.0.1:4100\"\ndevices = 1\n[[host]]\naddress = \"10.77.0.2:4100\"\n\
                devices = 2\n";
    fs::write(at.join("hosts.toml"), file).unwrap();
    let flags =
        ["--synthetic-data", "--batch", "256", "--stages", "1,2", "--steps", "6", "--save", "t.safetensors", "-q"];
    here(&[&["train", "m.onnx"][..], &flags].concat());
    let more = ["--steps", "6", "--save", "h.safetensors"];
    let both = [0, 1].map(|host| hosts.start(at, host, &more));
    for (code, message) in both.map(end) {
        assert_eq!(code, Some(0), "{message}");
    }
    let read = |name: &str| fs::read(at.join(name)).unwrap();
    assert!(read("t.safetensors") == read("h.safetensors"));

    let more = ["--steps", "20000", "--metrics", "m.jsonl"];
    let both = [0, 1].map(|host| hosts.start(at, host, &more));
    let until = Instant::now() + Duration::from_secs(60);
    while fs::metadata(at.join("m.jsonl")).map_or(0, |file| file.len()) == 0 {
        assert!(Instant::now() < until, "it does not train");
        thread::sleep(Duration::from_millis(20));
    }
    let name = &hosts.names[0];
    assert!(ip(&format!("-n {name} link set v{name} down")));
    let cut = Instant::now();
    let message = both.map(end);
    assert!(cut.elapsed() < Duration::from_secs(7), "{:?}", cut.elapsed());
    let peers = ["workers 1.0, 1.1 (stage 1), process ", "worker 0.0 (stage 0), process "];
    for ((code, message), peer) in message.iter().zip(peers) {
        assert_eq!(*code, Some(1), "{message}");
        assert!(message.contains(peer) && message.contains("has sent nothing for 5"), "{message}");
    }
}
