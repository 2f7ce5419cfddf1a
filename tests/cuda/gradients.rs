//! Sums of gradients, optimizer steps of many parameters, and concatenations of many tensors, on a GPU if there is one.
//! On other machines the simulated driver runs the same tests.

use super::products::{device, values};
use super::{distance, on_simulated_gpu};
use crate::support::reference::{facts_of, reference};
use compiler::op::table::rule;
use compiler::op::{Concat, Op, Reduce, ReduceKind};
use compiler::tensor::{DType, Tensor};
use runtime::device::api::{Device, OutputMode, ParameterUpdate, WeightRegions};
use runtime::device::buffer::Buffer;
use runtime::device::layout::accumulation_type;
use runtime::device::open;
use runtime::device::optimizer::{StepArgs, UpdateRule};

/// The output of an op, which starts with these bytes and has this type.
fn compute(
    device: &dyn Device,
    (op, inputs): (&Op, &[Tensor]),
    (dtype, before): (DType, &[u8]),
    mode: OutputMode,
) -> Tensor {
    let facts = facts_of(inputs);
    let results = rule(op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
    let kernel = device.kernel(op, &facts, &results).unwrap();
    let on_gpu: Vec<Buffer> = inputs.iter().map(|input| device.upload(input.bytes()).unwrap()).collect();
    let regions: Vec<_> = on_gpu.iter().map(Buffer::region).collect();
    let mut output = device.upload(before).unwrap();
    let mut workspace = device.upload(&vec![0xff; kernel.workspace()]).unwrap();
    let stream = device.stream().unwrap();
    stream.run(&*kernel, &regions, &mut [output.region_mut()], workspace.region_mut(), mode).unwrap();
    stream.finish().unwrap();
    Tensor::new(dtype, results[0].concrete().unwrap(), output.download().unwrap().into_owned().into()).unwrap()
}

#[test]
fn sums_begin_and_go_on() {
    let Some(device) = device() else { return };
    // One thread, columns or a block for each result, in one launch or in parts.
    let cases: [(&[usize], &[usize]); 7] = [
        (&[3, 7], &[0]),
        (&[40, 24], &[0]),
        (&[4096, 72], &[0]),
        (&[2, 600, 10], &[0, 1]),
        (&[5, 300], &[1]),
        (&[1, 90_000], &[1]),
        (&[4], &[0]),
    ];
    for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
        for (shape, axes) in cases {
            let op = Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: axes.to_vec(), keep: false });
            let (x, sum) = (values(dtype, shape, 1), accumulation_type(dtype));
            let exact = [x.cast(DType::F64)];
            let results = rule(&op).infer(&facts_of(&exact).iter().collect::<Vec<_>>()).unwrap();
            let term = reference(&op, &exact, &results).unwrap()[0].to_f64();
            let before = values(sum, &results[0].concrete().unwrap(), 2);
            for (mode, first) in [
                (OutputMode::BeginSum, vec![0xff; before.bytes().len()]),
                (OutputMode::Accumulate, before.bytes().to_vec()),
            ] {
                let got = compute(&*device, (&op, std::slice::from_ref(&x)), (sum, &first), mode);
                let adds = f64::from(u8::from(mode == OutputMode::Accumulate));
                let want: Vec<u8> = term
                    .iter()
                    .zip(before.to_f64())
                    .flat_map(|(term, before)| (term + adds * before).to_le_bytes())
                    .collect();
                let error = distance(&got, &Tensor::new(DType::F64, before.shape().to_vec(), want.into()).unwrap());
                // The terms are not rounded to 16 bits.
                let limit = if sum == DType::F64 { 1e-13 } else { 1e-5 };
                assert!(error <= limit, "{dtype}, {shape:?}, {mode:?}: {error:e} away");
            }
        }
    }
}

/// Two steps of many parameters, some of which are not aligned or have 16-bit copies.
fn run_two_steps(device: &dyn Device, rule: &UpdateRule) -> Vec<Vec<u8>> {
    let upload = |bytes: &[u8]| device.upload(bytes).unwrap();
    let parameter = |at: usize| {
        let count = 2 + at * 977 % 9001;
        let random = |seed: u64| upload(values(DType::F32, &[count], seed + at as u64).bytes());
        let zeros = || upload(&vec![0; 4 * count]);
        [random(1), random(1000), zeros(), zeros(), upload(&vec![0; 2 * count])]
    };
    let mut parameters: Vec<[Buffer; 5]> = (0..70).map(parameter).collect();
    let stream = device.stream().unwrap();
    for step in 1..=2 {
        let mut updates = Vec::new();
        for (at, [weights, gradient, first, second, rounded]) in parameters.iter_mut().enumerate() {
            let range = if at % 3 == 1 { 4 } else { 0 }..weights.len();
            let states = [first, second].into_iter().take(rule.states());
            updates.push(ParameterUpdate {
                args: StepArgs { dtype: DType::F32, scale: 0.5, step, rate: 1.0 },
                weights: WeightRegions::InPlace(weights.region_mut().slice(range.clone())),
                gradient: gradient.region_of(range.clone()),
                state: states.map(|state| state.region_mut().slice(range.clone())).collect(),
                rounded: (at % 2 == 0)
                    .then(|| (DType::Bf16, rounded.region_mut().slice(range.start / 2..range.end / 2))),
            });
        }
        stream.optimizer_step(rule, updates).unwrap();
    }
    stream.finish().unwrap();
    parameters.iter().flatten().map(|buffer| buffer.download().unwrap().into_owned()).collect()
}

#[test]
fn many_parameters_step_together() {
    let Some(device) = device() else { return };
    let cpu = open("cpu").unwrap();
    for rule in [
        UpdateRule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01 },
        UpdateRule::Adam { learning_rate: 0.1, betas: (0.9, 0.99), epsilon: 1e-8, weight_decay: 0.01, decoupled: true },
    ] {
        let [got, want] = [&*device, &*cpu].map(|device| run_two_steps(device, &rule));
        let difference = got.iter().zip(&want).position(|(got, want)| got != want);
        assert_eq!(difference, None, "{rule:?}: this buffer differs");
    }
}

#[test]
fn many_tensors_are_concatenated() {
    let Some(device) = device() else { return };
    for (axis, outer, inner, dtype) in [
        (1, &[3][..], &[][..], DType::F32),
        (0, &[], &[8], DType::Bf16),
        (2, &[2, 5], &[], DType::F16),
        (1, &[4], &[3], DType::F64),
    ] {
        let shape = |at: usize| [outer, &[at % 5 * 4], inner].concat();
        let inputs: Vec<Tensor> = (0..75).map(|at| values(dtype, &shape(at), at as u64)).collect();
        let op = Op::Concat(Concat { axis });
        let results = rule(&op).infer(&facts_of(&inputs).iter().collect::<Vec<_>>()).unwrap();
        let want = &reference(&op, &inputs, &results).unwrap()[0];
        let before = vec![0xff; want.bytes().len()];
        let got = compute(&*device, (&op, &inputs), (dtype, &before), OutputMode::Overwrite);
        assert!(got.bytes() == want.bytes(), "{dtype}, axis {axis}");
    }
}

#[test]
fn a_simulated_gpu_sums_steps_and_concatenates() {
    for seed in ["0", "5"] {
        for test in ["sums_begin_and_go_on", "many_parameters_step_together", "many_tensors_are_concatenated"] {
            let counts = on_simulated_gpu(&format!("gradients::{test}"), &[("PIPEC_SIM_SEED", seed)]);
            assert!(counts.is_none_or(|(_, launches)| launches > 0), "{test}");
        }
    }
}
