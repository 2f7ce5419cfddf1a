//! Gradients of embeddings as terms of sums: written as the first term, or added to the sum.

use crate::support::emulator::{Case, compiler, play};
use crate::support::reference::reference;
use crate::{FLOATS, distance, products::values};
use compiler::op::table::rule;
use compiler::op::{Op, ScatterAdd};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::device::cuda::gather;
use runtime::device::cuda::launch_plan::LaunchPlan;
use runtime::device::layout::{TensorLayout, accumulation_type};

#[test]
fn scattered_rows_are_written_to_sums_and_added() {
    let Some(compiler) = compiler() else {
        println!("skipped: no C++ compiler");
        return;
    };
    let (rows, indices) = (7, [3i64, 0, 3, 6, -7, 3]);
    let (mut cases, mut expected) = (Vec::new(), Vec::new());
    for (dtype, run) in FLOATS.into_iter().flat_map(|dtype| [1usize, 5, 16].map(|run| (dtype, run))) {
        let sum_dtype = accumulation_type(dtype);
        let scatter = ScatterAdd { axis: 0, size: rows.into() };
        let dy = values(dtype, &[indices.len(), run], 1);
        let at = Tensor::from_i64(&[indices.len()], &indices);
        let layouts = [&dy, &at].map(|tensor| TensorLayout { dtype: tensor.dtype(), shape: tensor.shape().to_vec() });
        let sum = TensorLayout { dtype: sum_dtype, shape: vec![rows, run] };
        let [first, next] = gather::terms(&scatter, &layouts[0], &layouts[1], &sum).unwrap();
        let wide = [dy.cast(sum_dtype), at.clone()];
        let facts = wide.each_ref().map(|tensor| Fact::of(tensor.dtype(), tensor.shape()));
        let op = Op::ScatterAdd(scatter);
        let results = rule(&op).infer(&[&facts[0], &facts[1]]).unwrap();
        let want = reference(&op, &wide, &results).unwrap().remove(0);
        // The first term alone, and with the same added to it.
        let both = LaunchPlan {
            launches: first.launches.iter().chain(&next.launches).cloned().collect(),
            scratch: first.scratch.max(next.scratch),
        };
        for (launch_plan, times) in [(first, 1.0), (both, 2.0)] {
            let inputs = vec![dy.bytes().to_vec(), at.bytes().to_vec()];
            cases.push(Case { launch_plan, inputs, outputs: vec![rows * run * sum_dtype.size()] });
            let want: Vec<f64> = want.to_f64().iter().map(|value| times * value).collect();
            expected.push(Tensor::from_f64(&[rows, run], &want).cast(sum_dtype));
        }
    }
    let outcomes = play(compiler, &cases);
    for (outcome, want) in outcomes.iter().zip(&expected) {
        let got = Tensor::new(want.dtype(), want.shape().to_vec(), outcome.outputs[0].clone().into()).unwrap();
        let limit = if want.dtype() == DType::F64 { 1e-14 } else { 1e-6 };
        assert!(distance(&got, want) <= limit, "{got:?} is not {want:?}");
    }
}
