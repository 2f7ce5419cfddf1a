//! Batch normalisation. Blocks reduce parts of a channel; those of a second launch join the results of all parts of
//! their channel, and normalise one.

use super::draft::{KernelBuilder, THREADS};
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::rows::{Read, Rows, Written};
use super::tail::Tail;
use crate::device::chain::Link;
use crate::device::layout::TensorLayout;
use compiler::op::BatchNorm;
use compiler::tensor::DType;

/// Blocks that fill a GPU.
const ENOUGH: usize = 1 << 10;

/// Fewest packs of a part that one thread has.
const LEAST_EACH: usize = 4;

/// Channels in parts.
struct Channels {
    dtype: DType,
    rows: Rows,
    channels: usize,
    /// Elements of an example in a channel.
    inner: usize,
    /// Elements of a channel, and of its parts but the last.
    count: usize,
    part: usize,
    parts: usize,
}

impl Channels {
    fn new(x: &TensorLayout) -> Channels {
        let (channels, inner) = (x.shape[1], x.shape[2..].iter().product::<usize>());
        let count = x.len() / channels;
        let rows = Rows::parts((count, inner, channels * inner), x.dtype.size());
        let packs = count / rows.width();
        let parts = (ENOUGH / channels).min(packs / (THREADS as usize * LEAST_EACH)).clamp(1, THREADS as usize);
        let part = packs.div_ceil(parts) * rows.width();
        Channels { dtype: x.dtype, rows, channels, inner, count, part, parts: count.div_ceil(part) }
    }

    fn kind(&self) -> &'static str {
        compute_type(accumulator(self.dtype))
    }

    /// A launch with one block per part, whose elements are those of `x` from `first` to `last`.
    fn each_part(&self, builder: KernelBuilder, lines: &str) -> Launch {
        let Channels { channels, inner, count, part, parts, .. } = *self;
        let lines = format!(
            "at channel = i / (at){parts}, from = channel * (at){inner}, first = i % (at){parts} * (at){part};\n\
             at last = first + (at){part} < (at){count} ? first + (at){part} : (at){count};\n{lines}"
        );
        builder.block_each(channels * parts, THREADS as usize, &lines)
    }

    /// The sum of an expression over the parts of a channel, which has its first number as `a`, its second as `b`, and
    /// the number of its elements as `n`.
    fn sum_over_parts(&self, value: &str) -> String {
        let (kind, Channels { count, part, parts, .. }) = (self.kind(), self);
        format!(
            "sum_across(threadIdx.x < {parts} ? [&] {{\n\
             const {kind}* own = partials + (channel * (at){parts} + threadIdx.x) * 2;\n\
             {kind} a = own[0], b = own[1], n = threadIdx.x + 1 < {parts} ? (at){part} : (at){};\nreturn {value};\n}}() : ({kind})0)",
            count - part * (parts - 1)
        )
    }

    fn operand<'a>(&self, name: &'a str) -> Read<'a> {
        Read { name, dtype: self.dtype, from: "from", is_kept: false }
    }

    fn result<'a>(&self, name: &'a str) -> Written<'a> {
        Written { name, dtype: self.dtype, from: "from" }
    }
}

/// Outputs y, mean, variance and reciprocal standard deviation.
pub fn kernel(op: &BatchNorm, x: &TensorLayout, scale: &TensorLayout) -> LaunchPlan {
    with(op, [x, scale], &Tail::none(x.dtype, 3))
}

/// A batch norm and the elementwise ops after it.
pub fn chain(op: &BatchNorm, links: &[Link], inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let [x, scale, ..] = inputs else { return None };
    Some(with(op, [x, scale], &Tail::of(links, inputs, 3, &[(0, "x")])?))
}

fn with(op: &BatchNorm, [x, scale]: [&TensorLayout; 2], tail: &Tail) -> LaunchPlan {
    let channels = Channels::new(x);
    let (kind, sums, count) = (channels.kind(), accumulator(x.dtype), channels.count);
    let mut launch_plan = LaunchPlan::default();
    let partials = launch_plan.take(channels.channels * channels.parts * 2 * sums.size());

    // The mean of a part, and the sum of squared differences from it. Both are sums of differences from the mean of a few
    // elements, so that little is cancelled.
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("partials", sums, partials);
    let lines = format!(
        "at some = last - first < {THREADS} ? last - first : (at){THREADS}, k0 = first + threadIdx.x;\n\
         {kind} pivot = sum_across(k0 < last ? {} : ({kind})0) / ({kind})some, sum = 0, squares = 0;\n{}\
         sum = sum_across(sum);\nsquares = sum_across(squares);\n\
         if (threadIdx.x == 0) {{\n{kind} off = sum / ({kind})(last - first);\n\
         partials[i * 2] = pivot + off;\npartials[i * 2 + 1] = squares - sum * off;\n}}",
        load(x.dtype, &format!("x[from + {}]", channels.rows.place())),
        channels.rows.pass(
            true,
            &[channels.operand("x")],
            &[],
            &format!("{kind} d = x_k - pivot;\nsum += d;\nsquares += d * d;")
        )
    );
    launch_plan.launches.push(channels.each_part(builder, &lines));

    let mut builder = KernelBuilder::new(x.len());
    // Scale, bias and statistics may have another type than x.
    let dtype_of = |k: usize| if k == 0 { x.dtype } else { scale.dtype };
    for (i, name) in ["x", "scale", "bias"].into_iter().enumerate() {
        builder.add_input(name, dtype_of(i), At::input(i));
    }
    for (k, name) in ["means", "variances", "rstds"].into_iter().enumerate() {
        builder.add_output(name, scale.dtype, tail.further_result(k));
    }
    tail.declare(&mut builder);
    builder.add_input("partials", sums, partials);
    let lines = format!(
        "{kind} mean = {} / ({kind}){count};\n{kind} variance = {} / ({kind}){count};\n\
         {kind} rstd = ({kind})1 / m_sqrt(variance + ({kind}){:?}), scale_of = {}, bias_of = {};\n\
         if (threadIdx.x == 0 && first == 0) {{ means[channel] = {}; variances[channel] = {}; rstds[channel] = {}; }}\n{}",
        channels.sum_over_parts("a * n"),
        channels.sum_over_parts("b + n * (a - mean) * (a - mean)"),
        op.epsilon,
        load(scale.dtype, "scale[channel]"),
        load(scale.dtype, "bias[channel]"),
        store(scale.dtype, "mean"),
        store(scale.dtype, "variance"),
        store(scale.dtype, "rstd"),
        channels.rows.pass(
            true,
            &[channels.operand("x")].into_iter().chain(tail.reads("from")).collect::<Vec<_>>(),
            &tail.written("from"),
            &tail.lines(&format!("from + {} + e", channels.rows.place()), "(x_k - mean) * rstd * scale_of + bias_of")
        )
    );
    launch_plan.launches.push(channels.each_part(builder, &lines));
    launch_plan
}

/// Outputs dx, dscale and dbias.
pub fn grad(x: &TensorLayout, scale: &TensorLayout) -> Option<LaunchPlan> {
    let channels = Channels::new(x);
    let (kind, sums, count) = (channels.kind(), accumulator(x.dtype), channels.count);
    let mut launch_plan = LaunchPlan::default();
    let partials = launch_plan.take(channels.channels * channels.parts * 2 * sums.size());
    let reads = |builder: &mut KernelBuilder| {
        for (i, name) in ["dy", "x", "scale", "means", "rstds"].into_iter().enumerate() {
            builder.add_input(name, if i < 2 { x.dtype } else { scale.dtype }, At::input(i));
        }
    };
    let [scale_of, mean, rstd] = ["scale[channel]", "means[channel]", "rstds[channel]"].map(|e| load(scale.dtype, e));
    let statistics = format!("{kind} mean = {mean}, rstd = {rstd}, scale_of = {scale_of};\n");
    let operands = || [channels.operand("dy"), channels.operand("x")];

    let mut builder = KernelBuilder::new(x.len());
    reads(&mut builder);
    builder.add_output("partials", sums, partials);
    let lines = format!(
        "{statistics}{kind} sum = 0, sum_x = 0;\n{}sum = sum_across(sum);\nsum_x = sum_across(sum_x);\n\
         if (threadIdx.x == 0) {{ partials[i * 2] = sum; partials[i * 2 + 1] = sum_x; }}",
        channels.rows.pass(true, &operands(), &[], "sum += dy_k;\nsum_x += dy_k * (x_k - mean) * rstd;")
    );
    launch_plan.launches.push(channels.each_part(builder, &lines));

    let mut builder = KernelBuilder::new(x.len());
    reads(&mut builder);
    for (i, name) in ["dx", "dscale", "dbias"].into_iter().enumerate() {
        builder.add_output(name, if i < 1 { x.dtype } else { scale.dtype }, At::output(i));
    }
    builder.add_input("partials", sums, partials);
    let dx = "rstd * scale_of * (dy_k - g - (x_k - mean) * rstd * g_x)";
    let lines = format!(
        "{statistics}{kind} total = {}, total_x = {}, g = total / ({kind}){count}, g_x = total_x / ({kind}){count};\n\
         if (threadIdx.x == 0 && first == 0) {{ dscale[channel] = {}; dbias[channel] = {}; }}\n{}",
        channels.sum_over_parts("a"),
        channels.sum_over_parts("b"),
        store(scale.dtype, "total_x"),
        store(scale.dtype, "total"),
        channels.rows.pass(true, &operands(), &[channels.result("dx")], &format!("dx_k = {};", store(x.dtype, dx)))
    );
    launch_plan.launches.push(channels.each_part(builder, &lines));
    Some(launch_plan)
}
