//! Elementwise ops that run in the last pass of a norm give the bits of the same ops one after another.

use crate::support::emulator::{Case, compiler, play};
use crate::{FLOATS, on_all_cores};
use compiler::op::table::rule;
use compiler::op::*;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::device::chain::{Link, Operand};
use runtime::device::cuda::chain;
use runtime::device::cuda::launch_plan::LaunchPlan;
use runtime::device::layout::TensorLayout;
use std::sync::Arc;

/// A norm and the ops after it: operands are inputs of the norm, then further tensors of the shape of its first result,
/// or one number.
struct Chain {
    norm: Op,
    inputs: Vec<Fact>,
    followers: Vec<(Op, Vec<Operand>)>,
    /// Whether each result is written; the last always is.
    written: Vec<bool>,
}

fn layouts(facts: &[Fact]) -> Vec<TensorLayout> {
    facts.iter().map(TensorLayout::of).collect()
}

impl Chain {
    fn results_of_norm(&self) -> Vec<Fact> {
        rule(&self.norm).infer(&self.inputs[..self.norm_inputs()].iter().collect::<Vec<_>>()).unwrap()
    }

    /// Number of inputs of the norm.
    fn norm_inputs(&self) -> usize {
        if matches!(self.norm, Op::BatchNorm(_)) { 3 } else { 5 }
    }

    fn links(&self) -> Vec<Link> {
        let results = self.results_of_norm();
        let first = Link {
            op: self.norm.clone(),
            operands: (0..self.norm_inputs()).map(Operand::Input).collect(),
            result: TensorLayout::of(&results[0]),
            is_written: self.written[0],
            further_results: layouts(&results[1..]),
        };
        let followers = self.followers.iter().zip(&self.written[1..]).map(|((op, operands), is_written)| Link {
            op: op.clone(),
            operands: operands.clone(),
            result: TensorLayout::of(&results[0]),
            is_written: *is_written,
            further_results: Vec::new(),
        });
        [first].into_iter().chain(followers).collect()
    }

    fn launch_plan(&self) -> Option<LaunchPlan> {
        chain::kernel(&self.links(), &layouts(&self.inputs))
    }

    fn data(&self) -> Vec<Vec<u8>> {
        let mut seed = 7u64;
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f64 / (1u64 << 24) as f64 * 2.0 - 0.9
        };
        let mut data = |fact: &Fact| {
            let shape = fact.concrete().unwrap();
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
            Tensor::from_f64(&shape, &values).cast(fact.dtype).bytes().to_vec()
        };
        self.inputs.iter().map(&mut data).collect()
    }

    /// The ops as one kernel; and the norm alone, with its results.
    fn cases(&self) -> [Case; 2] {
        let (results, data) = (self.results_of_norm(), self.data());
        let size = |fact: &Fact| fact.bytes().unwrap() as usize;
        let mut sizes = Vec::new();
        for (k, is_written) in self.written.iter().enumerate() {
            sizes.extend(is_written.then(|| size(&results[0])));
            if k == 0 {
                sizes.extend(results[1..].iter().map(size));
            }
        }
        let alone =
            LaunchPlan::new(&self.norm, &layouts(&self.inputs[..self.norm_inputs()]), &layouts(&results)).unwrap();
        let whole = Case { launch_plan: self.launch_plan().unwrap(), inputs: data.clone(), outputs: sizes };
        let inputs = data[..self.norm_inputs()].to_vec();
        [whole, Case { launch_plan: alone, inputs, outputs: results.iter().map(size).collect() }]
    }

    /// The ops after the norm as a kernel of their own, which reads its first result.
    fn followers_case(&self, first: &[u8]) -> Case {
        let result = self.results_of_norm()[0].clone();
        let mut inputs = self.inputs.clone();
        inputs.push(result.clone());
        let shifted = |operand: &Operand| match *operand {
            Operand::Result(0) => Operand::Input(self.inputs.len()),
            Operand::Result(k) => Operand::Result(k - 1),
            input => input,
        };
        let links = self.followers.iter().zip(&self.written[1..]).map(|((op, operands), is_written)| Link {
            op: op.clone(),
            operands: operands.iter().map(shifted).collect(),
            result: TensorLayout::of(&result),
            is_written: *is_written,
            further_results: Vec::new(),
        });
        // Its kernel reads all inputs at the shape of the result.
        let wide: Vec<usize> = (0..self.norm_inputs()).filter(|k| inputs[*k].shape != result.shape).collect();
        let mut input_layouts = layouts(&inputs);
        wide.iter().for_each(|k| input_layouts[*k] = TensorLayout::of(&result));
        let mut data = [self.data(), vec![first.to_vec()]].concat();
        wide.iter().for_each(|k| data[*k] = first.to_vec());
        let size = result.bytes().unwrap() as usize;
        let count = self.written[1..].iter().filter(|is_written| **is_written).count();
        let launch_plan = chain::kernel(&links.collect::<Vec<_>>(), &input_layouts).unwrap();
        Case { launch_plan, inputs: data, outputs: vec![size; count] }
    }
}

const ADD: Op = Op::Binary(Binary::Add);
const RELU: Op = Op::Unary(Unary::Relu);

fn chains(dtype: DType, shape: &[usize]) -> Vec<Chain> {
    use Operand::{Input, Result};
    let statistics = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let of = |dtype, shape: &[usize]| Fact::of(dtype, shape);
    let batch = || {
        let channel = of(statistics, &shape[1..2]);
        vec![of(dtype, shape), channel.clone(), channel]
    };
    let norm = || Op::BatchNorm(BatchNorm { epsilon: 1e-5 });
    let last = shape[shape.len() - 1];
    let layer = |more: &[Fact]| {
        let (row, of_row) = (of(statistics, &[last]), of(statistics, &[&shape[..shape.len() - 1], &[1]].concat()));
        let x = of(dtype, shape);
        let mut inputs = vec![x.clone(), x, row, of_row.clone(), of_row];
        inputs.extend_from_slice(more);
        inputs
    };
    let grad = || Op::LayerNormGrad(LayerNormGrad { axis: shape.len() - 1 });
    let x = of(dtype, shape);
    vec![
        Chain { norm: norm(), inputs: batch(), followers: vec![(RELU, vec![Result(0)])], written: vec![false, true] },
        Chain { norm: norm(), inputs: batch(), followers: vec![(RELU, vec![Result(0)])], written: vec![true, true] },
        Chain {
            norm: norm(),
            inputs: [batch(), vec![x.clone(), of(dtype, &[])]].concat(),
            followers: vec![
                (ADD, vec![Result(0), Input(3)]),
                (RELU, vec![Result(1)]),
                (Op::Binary(Binary::Mul), vec![Result(2), Input(4)]),
                (ADD, vec![Result(3), Input(0)]),
            ],
            written: vec![false, true, false, false, true],
        },
        Chain {
            norm: grad(),
            inputs: layer(&[x.clone(), of(DType::I64, &[])]),
            followers: vec![
                (ADD, vec![Result(0), Input(5)]),
                (Op::Dropout(Dropout { ratio: 0.4, stream: 3 }), vec![Result(1), Input(6)]),
            ],
            written: vec![false, true, true],
        },
        Chain {
            norm: norm(),
            inputs: [batch(), vec![of(DType::I64, &[])]].concat(),
            followers: vec![(Op::Dropout(Dropout { ratio: 0.4, stream: 3 }), vec![Result(0), Input(3)])],
            written: vec![true, true],
        },
        Chain {
            norm: grad(),
            inputs: layer(std::slice::from_ref(&x)),
            followers: vec![(ADD, vec![Result(0), Input(5)])],
            written: vec![false, true],
        },
        Chain {
            norm: grad(),
            inputs: layer(&[x]),
            followers: vec![
                (ADD, vec![Input(5), Result(0)]),
                (RELU, vec![Result(1)]),
                (ADD, vec![Result(2), Input(0)]),
            ],
            written: vec![true, true, false, true],
        },
    ]
}

#[test]
fn ops_after_a_norm_give_the_bits_of_ops_of_their_own() {
    let Some(compiler) = compiler() else {
        println!("skipped: no C++ compiler");
        return;
    };
    let shapes: [&[usize]; 3] = [&[3, 5, 7], &[2, 3, 8, 8], &[2, 2, 2049]];
    let chains: Vec<Chain> = [DType::F32, DType::Bf16]
        .into_iter()
        .flat_map(|dtype| shapes.map(|shape| chains(dtype, shape)))
        .flatten()
        .collect();
    let cases: Vec<Case> = on_all_cores(&chains, Chain::cases).into_iter().flatten().collect();
    let outcomes = play(compiler, &cases);
    let alone: Vec<&[Vec<u8>]> = outcomes.iter().skip(1).step_by(2).map(|outcome| &outcome.outputs[..]).collect();
    let followers: Vec<Case> =
        chains.iter().zip(&alone).map(|(chain, alone)| chain.followers_case(&alone[0])).collect();
    let followers = play(compiler, &followers);
    for (((chain, whole), alone), followers) in chains.iter().zip(outcomes.iter().step_by(2)).zip(alone).zip(followers)
    {
        let first = usize::from(!chain.written[0]);
        let want: Vec<&Vec<u8>> = alone[first..].iter().chain(&followers.outputs).collect();
        let what = format!("{} of {:?}", rule(&chain.norm).name(), chain.inputs[0]);
        assert!(whole.outputs.iter().eq(want), "{what}, written {:?}", chain.written);
    }
}

#[test]
fn what_does_not_suit_a_norm_has_kernels_of_its_own() {
    let (dtype, shape) = (DType::Bf16, [2, 3, 8]);
    let suits = |change: &dyn Fn(&mut Chain)| {
        let mut chain = chains(dtype, &shape).remove(2);
        change(&mut chain);
        chain.launch_plan().is_some()
    };
    assert!(suits(&|_| {}));
    // A row is not an operand of every element, nor is a wider tensor read in the same packs.
    assert!(!suits(&|chain| chain.inputs[3] = Fact::of(dtype, &[8])));
    assert!(!suits(&|chain| chain.inputs[3] = Fact::of(DType::F32, &shape)));
    assert!(!suits(&|chain| chain.followers[0].1[1] = Operand::Input(1)));
}

/// Sources of kernels with ops after norms.
pub fn texts() -> Vec<Arc<str>> {
    let all_chains = FLOATS
        .into_iter()
        .flat_map(|dtype| chains(dtype, &[8, 64, 56, 56]).into_iter().chain(chains(dtype, &[4, 512, 768])));
    all_chains.flat_map(|chain| chain.launch_plan().unwrap().launches).map(|launch| launch.text).collect()
}
