//! Attention without the score matrix: one block per query, which visits the keys in chunks of one key per thread, with
//! a running maximum (Milakov and Gimelshein, 2018). The gradients of keys and values have one block per key.

use super::draft::{KernelBuilder, THREADS, threads_for};
use super::element::{accumulator, held, literal, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::movement::shard_element;
use super::offsets::{Walk, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::attention::{COARSE, Extras};
use compiler::op::{Attention, AttentionGrad, DropoutShard, EmptyRow};
use compiler::tensor::DType;

struct Pairs<'a> {
    op: Attention,
    dtype: DType,
    /// Leading axes, heads, queries and keys.
    shape: Vec<usize>,
    each: usize,
    depth: usize,
    width: usize,
    mask: Option<&'a TensorLayout>,
    extras: Extras,
    most: usize,
}

impl<'a> Pairs<'a> {
    fn new(op: &Attention, fixed: usize, first: usize, inputs: &'a [TensorLayout]) -> Option<Pairs<'a>> {
        let [query, key, value] = inputs.get(first..first + 3)? else { return None };
        let extras = op.extras(fixed, inputs.len()).ok()?;
        let heads = query.shape.len() - 3;
        let mut shape = query.shape[..heads + 2].to_vec();
        shape.push(key.shape[heads + 1]);
        let (depth, width) = (query.shape[heads + 2], value.shape[heads + 2]);
        let each = query.shape[heads] / key.shape[heads];
        let scores: usize = shape.iter().product();
        let most = inputs.iter().map(TensorLayout::len).chain([scores, scores / shape[heads + 2] * width]).max()?;
        let mask = extras.mask.map(|at| &inputs[at]);
        Some(Pairs { op: *op, dtype: query.dtype, shape, each, depth, width, mask, extras, most })
    }

    fn sums(&self) -> DType {
        accumulator(self.dtype)
    }

    fn kind(&self) -> &'static str {
        held(self.sums())
    }

    fn number(&self, value: f64) -> String {
        literal(self.sums(), value)
    }

    fn keys(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    fn queries(&self) -> usize {
        self.shape[self.shape.len() - 2]
    }

    fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// A kernel that reads query, key and value, inputs `first` and following, and what is optional.
    fn draft(&self, first: usize) -> KernelBuilder {
        let mut draft = KernelBuilder::new(self.most);
        for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
            draft.reads(name, self.dtype, At::input(first + i));
        }
        if let (Some(mask), Some(at)) = (self.mask, self.extras.mask) {
            draft.reads("mask", mask.dtype, At::input(at));
        }
        if let (Some(dropout), Some(at)) = (self.op.dropout, self.extras.counter) {
            draft.reads("counter", DType::I64, At::input(at));
            draft.add(&format!("u64 seed = mix(mix({}ull) ^ (u64)counter[0]);", dropout.stream));
        }
        if let Some(at) = self.extras.device {
            draft.reads("device", DType::I64, At::input(at));
        }
        draft
    }

    /// The score `s` of query `row` of all heads and key `j`.
    fn score(&self) -> String {
        let (kind, [queries, keys]) = (self.kind(), [self.queries(), self.keys()]);
        let mut lines = format!(
            "at own = row / (at){} * (at){keys} + j;\n{kind} s = 0;\n\
             for (at c = 0; c < (at){depth}; c++) s = m_fma(({kind}){}, ({kind}){}, s);\ns *= {};\n",
            queries * self.each,
            load(self.dtype, &format!("q[row * (at){} + c]", self.depth)),
            load(self.dtype, &format!("k[own * (at){} + c]", self.depth)),
            self.number(self.op.scale),
            depth = self.depth,
        );
        let never = self.number(f64::NEG_INFINITY);
        if let Some(mask) = self.mask {
            let walk = Walk::stretched(&mask.shape, &self.shape);
            let (places, at) = offsets("m", &format!("row * (at){keys} + j"), &self.shape, &[walk]);
            let element = load(mask.dtype, &format!("mask[{}]", at[0]));
            lines += &places;
            lines += &match mask.dtype {
                DType::Bool => format!("if (!{element}) s = {never};\n"),
                _ => format!("s += ({kind}){element};\n"),
            };
        }
        if self.op.causal {
            lines += &format!("if (j > row % (at){queries}) s = {never};\n");
        }
        lines
    }

    /// The dropout factor of query `row` and key `j`.
    fn kept(&self) -> String {
        let Some(dropout) = self.op.dropout else { return self.number(1.0) };
        let least = (dropout.ratio * (1u64 << 53) as f64) as u64;
        let (one, none) = (self.number(dropout.scale()), self.number(0.0));
        let own = format!("((u64)row * {}ull + (u64)j)", self.keys());
        let element =
            self.op.part.map_or(own.clone(), |DropoutShard { run, devices }| shard_element(&own, run, devices));
        format!("(mix(seed ^ {element}) >> 11 >= {least}ull ? {one} : {none})")
    }

    /// Keys of query `row`.
    fn last(&self) -> String {
        let (queries, keys) = (self.queries(), self.keys());
        match self.op.causal {
            true => format!("at last = row % (at){queries} + 1;\nlast = last < (at){keys} ? last : (at){keys};\n"),
            false => format!("at last = (at){keys};\n"),
        }
    }

    /// Weight `p`, its factor `kept`, and slope `ds` of the score, of query `row` and key `j`.
    fn slopes(&self) -> String {
        let kind = self.kind();
        let flat = if self.op.empty == EmptyRow::Nan { "" } else { "if (is_empty) ds = 0;\n" };
        format!(
            "{}{kind} sum = ({kind}){}, kept = {};\nbool is_empty = sum == {};\n\
             {kind} p = is_empty ? {} : m_exp(s - sum) * norms[row], dp = 0;\n\
             for (at c = 0; c < (at){width}; c++) dp = m_fma(({kind}){}, ({kind}){}, dp);\n\
             {kind} ds = {} * p * (kept * dp - shares[row]);\n{flat}",
            self.score(),
            load(self.sums(), "log_sums[row]"),
            self.kept(),
            self.number(f64::NEG_INFINITY),
            self.number(self.op.empty.weight(self.keys())),
            load(self.dtype, &format!("dy[row * (at){} + c]", self.width)),
            load(self.dtype, &format!("v[own * (at){} + c]", self.width)),
            self.number(self.op.scale),
            width = self.width,
        )
    }
}

/// Declares sums `name` over the columns of a thread.
fn sums_of(kind: &str, name: &str, size: usize, threads: usize) -> String {
    format!("{kind} {name}[{0}];\nfor (int n = 0; n < {0}; n++) {name}[n] = 0;\n", size.div_ceil(threads))
}

/// Runs `lines` for every column `c < size`, the thread's `n`th.
fn columns(size: usize, threads: usize, lines: &str) -> String {
    format!(
        "for (int n = 0; n < {}; n++) {{\nat c = threadIdx.x + (at)n * blockDim.x;\nif (c < (at){size}) {{\n{lines}\n}}\n}}\n",
        size.div_ceil(threads)
    )
}

pub fn kernel(op: &Attention, inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let pairs = Pairs::new(op, 3, 0, inputs)?;
    let (kind, keys, width) = (pairs.kind(), pairs.keys(), pairs.width);
    let threads = threads_for(keys) as usize;
    let mut draft = pairs.draft(0);
    draft.writes("y", pairs.dtype, At::output(0));
    draft.writes("log_sums", pairs.sums(), At::output(1));
    draft.add(&format!("__shared__ {kind} weights[{THREADS}];"));
    let never = pairs.number(f64::NEG_INFINITY);
    let value = |place: &str| load(pairs.dtype, &format!("v[(first + {place}) * (at){width} + c]"));
    let weight = op.empty.weight(keys);
    let empty = match op.empty {
        EmptyRow::Zero => "total = 0;\n".to_string(),
        _ => format!(
            "total = 0;\nfor (at j = 0; j < (at){keys}; j++) total += {} * {} * ({kind}){};\n",
            pairs.number(weight),
            pairs.kept(),
            value("j")
        ),
    };
    let lines = format!(
        "at row = i, first = row / (at){shared} * (at){keys};\n{kind} most = {never}, sum = 0;\n{acc}{last}\
         for (at from = 0; from < last; from += blockDim.x) {{\nat j = from + threadIdx.x;\n\
         {kind} score = {never}, factor = 0;\nif (j < last) {{\n{score}score = s;\nfactor = {kept};\n}}\n\
         {kind} top = m_max(most, across(score, []({kind} a, {kind} b) {{ return m_max(a, b); }}));\n\
         {kind} shift = top == {never} ? ({kind})0 : top, p = j < last ? m_exp(score - shift) : ({kind})0;\n\
         {kind} old = m_exp(most - shift);\nsum = sum * old + sum_across(p);\nmost = top;\n\
         weights[threadIdx.x] = p * factor;\n__syncthreads();\n\
         at count = last - from < blockDim.x ? last - from : blockDim.x;\n{add}__syncthreads();\n}}\n\
         {finish}if (threadIdx.x == 0) log_sums[i] = most == {never} ? most : most + m_log(sum);",
        shared = pairs.queries() * pairs.each,
        acc = sums_of(kind, "sums", width, threads),
        last = pairs.last(),
        score = pairs.score(),
        kept = pairs.kept(),
        add = columns(
            width,
            threads,
            &format!(
                "sums[n] *= old;\nfor (at l = 0; l < count; l++) sums[n] = m_fma(weights[l], ({kind}){}, sums[n]);",
                value("from + l")
            )
        ),
        finish = columns(
            width,
            threads,
            &format!(
                "{kind} total = sums[n] / sum;\nif (most == {never}) {{\n{empty}}}\ny[i * (at){width} + c] = {};",
                store(pairs.dtype, "total")
            )
        ),
    );
    Some(LaunchPlan::of(draft.block_each(pairs.rows(), keys, &lines)))
}

pub fn grad(op: &AttentionGrad, inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let pairs = Pairs::new(&op.forward, 6, 1, inputs)?;
    let (kind, keys, queries, rows) = (pairs.kind(), pairs.keys(), pairs.queries(), pairs.rows());
    let (depth, width) = (pairs.depth, pairs.width);
    let mut launch_plan = LaunchPlan::default();
    let [shares, norms] = [(); 2].map(|()| launch_plan.take(rows * pairs.sums().size()));
    let mut draft = pairs.draft(1);
    draft.reads("dy", pairs.dtype, At::input(0));
    draft.reads("y", pairs.dtype, At::input(4));
    draft.reads("log_sums", pairs.sums(), At::input(5));
    draft.writes("shares", pairs.sums(), shares);
    draft.writes("norms", pairs.sums(), norms);
    let lines = format!(
        "at row = i;\n{kind} share = 0, norm = 1, size = m_fabs(log_sums[i]);\n\
         for (at c = 0; c < (at){width}; c++) share = m_fma(({kind}){}, ({kind}){}, share);\nshares[i] = share;\n\
         if (size > {} && size < {}) {{\nnorm = 0;\n\
         for (at j = 0; j < (at){keys}; j++) {{\n{}norm += m_exp(s - log_sums[i]);\n}}\nnorm = 1 / norm;\n}}\nnorms[i] = norm;",
        load(pairs.dtype, &format!("dy[i * (at){width} + c]")),
        load(pairs.dtype, &format!("y[i * (at){width} + c]")),
        pairs.number(COARSE),
        pairs.number(f64::INFINITY),
        pairs.score(),
    );
    launch_plan.launches.push(draft.each(rows, &lines));
    let draft = |outputs: &[(&str, usize)], shared: &str| {
        let mut draft = pairs.draft(1);
        draft.reads("dy", pairs.dtype, At::input(0));
        draft.reads("log_sums", pairs.sums(), At::input(5));
        draft.reads("shares", pairs.sums(), shares);
        draft.reads("norms", pairs.sums(), norms);
        for (name, output) in outputs {
            draft.writes(name, pairs.dtype, At::output(*output));
        }
        draft.add(&format!("__shared__ {kind} {shared};"));
        draft
    };

    let threads = threads_for(keys) as usize;
    let term = load(pairs.dtype, &format!("k[(first + from + l) * (at){depth} + c]"));
    let lines = format!(
        "at row = i, first = row / (at){shared} * (at){keys};\n{sums}{last}\
         for (at from = 0; from < last; from += blockDim.x) {{\nat j = from + threadIdx.x;\n\
         if (j < last) {{\n{slopes}slopes[threadIdx.x] = ds;\n}}\n__syncthreads();\n\
         at count = last - from < blockDim.x ? last - from : blockDim.x;\n{add}__syncthreads();\n}}\n{finish}",
        shared = queries * pairs.each,
        sums = sums_of(kind, "sums", depth, threads),
        last = pairs.last(),
        slopes = pairs.slopes(),
        add = columns(
            depth,
            threads,
            &format!("for (at l = 0; l < count; l++) sums[n] = m_fma(slopes[l], ({kind}){term}, sums[n]);")
        ),
        finish = columns(depth, threads, &format!("dq[i * (at){depth} + c] = {};", store(pairs.dtype, "sums[n]"))),
    );
    let shared = format!("slopes[{THREADS}]");
    launch_plan.launches.push(draft(&[("dq", 0)], &shared).block_each(rows, keys, &lines));

    // All queries of the heads that share the key are adjacent.
    let (threads, all) = (threads_for(queries) as usize, queries * pairs.each);
    let [query, slope] = [("q", depth), ("dy", width)]
        .map(|(name, size)| load(pairs.dtype, &format!("{name}[(first + from + l) * (at){size} + c]")));
    let lines = format!(
        "at j = i % (at){keys}, first = i / (at){keys} * (at){all};\n{k_sums}{v_sums}\
         for (at from = 0; from < (at){all}; from += blockDim.x) {{\nat row = first + from + threadIdx.x;\n\
         if (from + threadIdx.x < (at){all}) {{\n{slopes}slopes[threadIdx.x] = ds;\nweights[threadIdx.x] = p * kept;\n}}\n\
         __syncthreads();\nat count = (at){all} - from < blockDim.x ? (at){all} - from : blockDim.x;\n\
         {add_k}{add_v}__syncthreads();\n}}\n{finish_k}{finish_v}",
        k_sums = sums_of(kind, "k_sums", depth, threads),
        v_sums = sums_of(kind, "v_sums", width, threads),
        slopes = pairs.slopes(),
        add_k = columns(
            depth,
            threads,
            &format!("for (at l = 0; l < count; l++) k_sums[n] = m_fma(slopes[l], ({kind}){query}, k_sums[n]);")
        ),
        add_v = columns(
            width,
            threads,
            &format!("for (at l = 0; l < count; l++) v_sums[n] = m_fma(weights[l], ({kind}){slope}, v_sums[n]);")
        ),
        finish_k = columns(depth, threads, &format!("dk[i * (at){depth} + c] = {};", store(pairs.dtype, "k_sums[n]"))),
        finish_v = columns(width, threads, &format!("dv[i * (at){width} + c] = {};", store(pairs.dtype, "v_sums[n]"))),
    );
    let shared = format!("slopes[{THREADS}], weights[{THREADS}]");
    let launch = draft(&[("dk", 1), ("dv", 2)], &shared).block_each(rows / all * keys, queries, &lines);
    launch_plan.launches.push(launch);
    Some(launch_plan)
}
