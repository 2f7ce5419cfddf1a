//! Runs CUDA kernel sources on the CPU: compiles them with the host C++ compiler and executes the launches with GPU
//! geometry and arguments. Buffers end at a guard page, and blocks and their threads run in two orders.

use runtime::device::cuda::launch_plan::{Base, COUNTERS, Fault, LaunchPlan};
use runtime::device::cuda::prelude::PRELUDE;
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// A launch plan with its inputs.
pub struct Case {
    pub launch_plan: LaunchPlan,
    pub inputs: Vec<Vec<u8>>,
    /// Bytes of each output.
    pub outputs: Vec<usize>,
}

#[derive(Debug, PartialEq)]
pub struct Played {
    pub outputs: Vec<Vec<u8>>,
    pub fault: Fault,
}

/// The name of an installed C++ compiler.
pub fn compiler() -> Option<&'static str> {
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    ["c++", "g++", "clang++"].into_iter().find(works)
}

/// Runs all cases; outputs and scratch are pre-filled with a pattern that is NaN in every float type.
pub fn play(compiler: &str, cases: &[Case]) -> Vec<Played> {
    let folder = tempfile::tempdir().unwrap();
    let mut kernels: Vec<Arc<str>> = Vec::new();
    let mut kernel_indices: HashMap<Arc<str>, usize> = HashMap::new();
    for launch in cases.iter().flat_map(|case| &case.launch_plan.launches) {
        kernel_indices.entry(launch.text.clone()).or_insert_with(|| {
            kernels.push(launch.text.clone());
            kernels.len() - 1
        });
    }
    let program = build(compiler, folder.path(), &kernels);
    let job = folder.path().join("job");
    fs::write(&job, encode_job(cases, &kernel_indices)).unwrap();
    let run = |order: &str| {
        let result = folder.path().join(order);
        let output = Command::new(&program).arg(&job).arg(&result).arg(order).output().unwrap();
        assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        fs::read(result).unwrap()
    };
    let (forward, backward) = (run("forward"), run("backward"));
    let (forward, backward) = (decode_results(cases, &forward), decode_results(cases, &backward));
    for (i, (a, b)) in forward.iter().zip(&backward).enumerate() {
        assert_eq!(a, b, "case {i} depends on the order of threads or blocks");
    }
    forward
}

fn build(compiler: &str, folder: &Path, kernels: &[Arc<str>]) -> std::path::PathBuf {
    let mut text = format!("{}\n{PRELUDE}\n", include_str!("machine.h"));
    let mut table = "static const Entry ENTRIES[] = {\n".to_string();
    for (i, kernel) in kernels.iter().enumerate() {
        let body = kernel.replace(PRELUDE, "").replace("extern \"C\" ", "static ");
        let needs_sync = ["__sync", "__shfl", "across", "is_last_block"].iter().any(|call| body.contains(call));
        text.push_str(&format!("namespace k{i} {{\n{body}\n}}\n"));
        table.push_str(&format!("{{[](void** a) {{ call(k{i}::kernel, a); }}, {needs_sync}}},\n"));
    }
    text.push_str(&table);
    text.push_str(
        "};\nint main(int, char** a) { return play(ENTRIES, fopen(a[1], \"rb\"), fopen(a[2], \"wb\"), a[3][0] == 'b'); }\n",
    );
    let (source, program) = (folder.join("kernels.cpp"), folder.join("kernels"));
    fs::write(&source, text).unwrap();
    let mut command = Command::new(compiler);
    // No contraction to fused multiply-add, as on a GPU.
    command.args(["-std=c++17", "-O0", "-w", "-ffp-contract=off", "-o"]).arg(&program).arg(&source);
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}", message.lines().take(40).collect::<Vec<_>>().join("\n"));
    program
}

fn sizes(case: &Case) -> Vec<usize> {
    let inputs = case.inputs.iter().map(Vec::len);
    let internal_sizes = [case.launch_plan.scratch, size_of::<Fault>(), COUNTERS * size_of::<u32>()];
    inputs.chain(case.outputs.iter().copied()).chain(internal_sizes).collect()
}

fn encode_job(cases: &[Case], kernel_indices: &HashMap<Arc<str>, usize>) -> Vec<u8> {
    let mut job = Vec::new();
    let mut write_number = |value: usize| job.write_all(&(value as u64).to_le_bytes()).unwrap();
    write_number(cases.iter().map(|case| sizes(case).len()).sum());
    for case in cases {
        let sizes = sizes(case);
        for (i, &size) in sizes.iter().enumerate() {
            job.write_all(&(size as u64).to_le_bytes()).unwrap();
            match case.inputs.get(i) {
                Some(bytes) => job.write_all(bytes).unwrap(),
                None if i + 2 >= sizes.len() => job.write_all(&vec![0; size]).unwrap(),
                None => job.write_all(&vec![0xff; size]).unwrap(),
            }
        }
    }
    let mut write_number = |value: usize| job.write_all(&(value as u64).to_le_bytes()).unwrap();
    write_number(cases.iter().map(|case| case.launch_plan.launches.len()).sum());
    let mut first_buffer = 0;
    for case in cases {
        let (inputs, outputs) = (case.inputs.len(), case.outputs.len());
        for launch in &case.launch_plan.launches {
            write_number(kernel_indices[&launch.text]);
            write_number(launch.blocks as usize);
            write_number(launch.threads as usize);
            write_number(launch.arguments.len());
            for argument in &launch.arguments {
                let buffer = match argument.base {
                    Base::Input(i) => i,
                    Base::Output(i) => inputs + i,
                    Base::Scratch => inputs + outputs,
                    Base::Fault => inputs + outputs + 1,
                    Base::Counters => inputs + outputs + 2,
                };
                write_number(first_buffer + buffer);
                write_number(argument.offset);
            }
        }
        first_buffer += inputs + outputs + 3;
    }
    job
}

fn decode_results(cases: &[Case], mut bytes: &[u8]) -> Vec<Played> {
    let mut take = |count: usize| {
        let (taken, rest) = bytes.split_at(count);
        bytes = rest;
        taken.to_vec()
    };
    let results = cases.iter().map(|case| {
        let mut buffers: Vec<Vec<u8>> = sizes(case).into_iter().map(&mut take).collect();
        assert!(buffers.pop().unwrap().iter().all(|byte| *byte == 0), "a counter of blocks is not set back");
        let cell: [u8; size_of::<Fault>()] = buffers.pop().unwrap().try_into().unwrap();
        let fault = Fault::of(&cell);
        let outputs = buffers.drain(case.inputs.len()..).take(case.outputs.len()).collect();
        Played { outputs, fault }
    });
    results.collect()
}
