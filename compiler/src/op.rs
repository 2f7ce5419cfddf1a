//! The core ops: every op as a struct with typed fields and a definition.
//!
//! Importers lower source operators to these ops, gradients are graphs of them, and a device implements only them. The
//! semantics of an op (shapes, cost, backward, reference kernel, samples) are its [`OpRule`] in `op/NAME.rs`; [`table`]
//! lists all rules.
//!
//! Conventions. Shapes are row-major. Axes are never negative. Elementwise ops with several inputs broadcast as in
//! NumPy. `N` is the batch, `C` channels, `D…` the spatial axes. An op computes in the element type of its inputs
//! unless it says otherwise.

pub mod attention;
pub mod batch_gather;
pub mod batch_norm;
pub mod binary;
pub mod bit_cast;
pub mod broadcast;
pub mod cast;
pub mod collective;
pub mod compare;
pub mod concat;
pub mod conv;
pub mod cross_entropy;
pub mod cumulative;
pub mod dropout;
pub mod expr;
pub mod flip;
pub mod gather;
pub mod grouped_matmul;
pub mod gru;
pub mod iota;
pub mod layer_norm;
pub mod lstm;
pub mod matmul;
pub mod pad;
pub mod pool;
pub mod recurrent;
pub mod reduce;
pub mod reshape;
pub mod rnn;
pub mod rule;
pub mod sample;
pub mod scatter;
pub mod select;
pub mod sharding;
pub mod slice;
pub mod softmax;
pub mod source;
pub mod stop_gradient;
pub mod table;
pub mod top_k;
pub mod transpose;
pub mod unary;
pub mod uniform;
pub mod window;

use crate::tensor::dim::{Dim, DimError};
use crate::tensor::fact::Fact;
use crate::tensor::view::{View, ViewMut};
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

pub use crate::op::sharding::{Group, LocalContext, Sharding, SplitDim, Strategy};
pub use expr::{Expr, emit, emit_all};
pub use rule::{
    BackwardContext, Cost, Emit, FactError, KernelError, Named, OpRule, Sample, arity, check_axis, check_dtype,
    check_float, check_like, check_same, elements, moved_bytes,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Op {
    // Sources.
    Input(Input),
    Parameter(Parameter),
    State(State),
    Constant(Constant),
    Iota(Iota),
    Uniform(Uniform),
    // Elementwise.
    Unary(Unary),
    Binary(Binary),
    Compare(Compare),
    Select(Select),
    Cast(Cast),
    BitCast(BitCast),
    // Reductions.
    Reduce(Reduce),
    ArgReduce(ArgReduce),
    TopK(TopK),
    Cumulative(Cumulative),
    // Contractions.
    #[serde(rename = "matmul")]
    MatMul(MatMul),
    #[serde(rename = "grouped_matmul")]
    GroupedMatMul(GroupedMatMul),
    #[serde(rename = "grouped_matmul_grad")]
    GroupedMatMulGrad(GroupedMatMulGrad),
    Conv(Conv),
    ConvInputGrad(ConvInputGrad),
    ConvWeightGrad(ConvWeightGrad),
    // Attention.
    Attention(Attention),
    AttentionGrad(AttentionGrad),
    // Recurrent layers.
    Lstm(Lstm),
    LstmGrad(LstmGrad),
    Gru(Gru),
    GruGrad(GruGrad),
    Rnn(Rnn),
    RnnGrad(RnnGrad),
    // Windows.
    MaxPool(MaxPool),
    MaxPoolGrad(MaxPoolGrad),
    AvgPool(AvgPool),
    AvgPoolGrad(AvgPoolGrad),
    // Movement.
    Reshape(Reshape),
    Transpose(Transpose),
    Broadcast(Broadcast),
    Slice(Slice),
    Pad(Pad),
    Concat(Concat),
    Flip(Flip),
    Gather(Gather),
    ScatterAdd(ScatterAdd),
    BatchGather(BatchGather),
    BatchScatterAdd(BatchScatterAdd),
    Scatter(Scatter),
    StopGradient(StopGradient),
    // Normalisation and losses.
    Softmax(Softmax),
    LogSoftmax(LogSoftmax),
    LayerNorm(LayerNorm),
    LayerNormGrad(LayerNormGrad),
    BatchNorm(BatchNorm),
    BatchNormGrad(BatchNormGrad),
    Dropout(Dropout),
    CrossEntropy(CrossEntropy),
    CrossEntropyGrad(CrossEntropyGrad),
    // Collectives and other ops of tensor-parallel stages.
    AllReduce(AllReduce),
    ReduceScatter(ReduceScatter),
    AllGather(AllGather),
    AllToAll(AllToAll),
    Shard(Shard),
    DropoutPart(DropoutPart),
}

/// A tensor given by the caller for every minibatch. No inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// Name in the source model and in data files.
    pub name: String,
    pub fact: Fact,
}

/// A trained tensor. Its initial value is stored outside the graph, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameter {
    /// Name in the source model, in checkpoints and in gradients.
    pub name: String,
    pub fact: Fact,
}

/// A tensor kept between minibatches without a gradient, such as a running mean. Its initial value is stored outside
/// the graph, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Name in the source model and in checkpoints.
    pub name: String,
    pub fact: Fact,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    pub tensor: Tensor,
}

/// `0, 1, 2, …` along `axis`, constant along all other axes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Iota {
    pub fact: Fact,
    pub axis: usize,
}

/// Uniform random numbers in `[0, 1)`. Input: counter (`i64`, one value). Each number is a function of stream, counter
/// and element index; see [`uniform`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Uniform {
    pub fact: Fact,
    /// Distinguishes the random ops of a model, dropout included.
    pub stream: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unary {
    Neg,
    Abs,
    /// -1, 0 or 1.
    Sign,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Sin,
    Cos,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Tanh,
    Asinh,
    Acosh,
    Atanh,
    Sigmoid,
    /// `max(x, 0)`; the gradient at 0 is 0.
    Relu,
    Erf,
    /// `x·Φ(x)` with the exact normal distribution.
    Gelu,
    /// `x/2·(1+tanh(√(2/π)(x+0.044715x³)))`
    GeluTanh,
    /// `x·sigmoid(x)`
    Silu,
    Softplus,
    Floor,
    Ceil,
    /// Rounds to nearest, ties to even.
    Round,
    /// Logical not of `bool`; bitwise not of integers.
    Not,
}

/// Elementwise `y = f(a, b)`, broadcasting. Both inputs have one element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// `a / b`; integers truncate toward zero, and division by zero is 0.
    Div,
    Pow,
    /// Maximum; NaN propagates; on a tie, both operands get half of the gradient.
    Max,
    /// Minimum; NaN propagates; on a tie, both operands get half of the gradient.
    Min,
    /// Remainder of `a / b` with the sign of `b`, as Python's `%`.
    Mod,
    /// Logical and of `bool`; bitwise and of integers.
    And,
    /// Logical or of `bool`; bitwise or of integers.
    Or,
    /// Logical exclusive or of `bool`; bitwise exclusive or of integers.
    Xor,
    /// Left shift of the integer `a` by `b` bits; 0 if `b` is negative or at least the bit width.
    ShiftLeft,
    /// Arithmetic right shift of the integer `a` by `b` bits; only sign bits remain if `b` is negative or at least the
    /// bit width.
    ShiftRight,
}

/// Elementwise comparison with result type `bool`, broadcasting. Both inputs have one element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    Equal,
    Less,
    LessEqual,
}

/// Elementwise `condition ? a : b`, broadcasting. Inputs: condition (`bool`), a, b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Select {}

/// Converts to element type `to`; floats truncate toward zero when they become integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {
    pub to: DType,
}

/// Reinterprets the bits as element type `to` of the same size. No gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitCast {
    pub to: DType,
}

/// Reduces `axes`. Without axes it is a copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reduce {
    pub kind: ReduceKind,
    /// The reduced axes, sorted.
    pub axes: Vec<usize>,
    /// Keeps the reduced axes with size 1.
    pub keep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    Sum,
    /// Arithmetic mean; NaN over no elements.
    Mean,
    /// Maximum; the gradient is split equally among equal elements.
    Max,
    /// Minimum; the gradient is split equally among equal elements.
    Min,
    Prod,
}

/// The `i64` index of the largest (or smallest) element along `axis`; the first one on ties. No gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgReduce {
    /// The largest element, otherwise the smallest.
    pub largest: bool,
    pub axis: usize,
    /// Keeps the axis with size 1.
    pub keep: bool,
}

/// The `count` largest (or smallest) elements along `axis`, sorted, with the earlier one first on ties, and their `i64`
/// indices. NaN is larger than every number. Outputs: values, indices; gradients flow through the values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopK {
    pub axis: usize,
    /// Size of the axis in the result, at most that of the input.
    pub count: Dim,
    /// The largest elements, otherwise the smallest.
    pub largest: bool,
}

/// Cumulative reduction along `axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cumulative {
    pub kind: CumulativeKind,
    pub axis: usize,
    /// Excludes the element itself from its result.
    pub exclusive: bool,
    /// Starts from the last element.
    pub reverse: bool,
}

/// The operator of [`Cumulative`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CumulativeKind {
    Sum,
    /// Product; no gradient.
    Prod,
}

/// Matrix product of the last two axes, `[…, M, K] × […, K, N] → […, M, N]`; leading axes broadcast. A transposed
/// operand is stored as `[…, K, M]` or `[…, N, K]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatMul {
    pub transpose_a: bool,
    pub transpose_b: bool,
}

/// Multiplies every row by the matrix of its group; rows are sorted by group. Inputs: x `[S, K]`, matrices `[G, K, N]`
/// or transposed `[G, N, K]`, and the end of each group's rows (`i64[G]`). Output: `[S, N]`; see [`grouped_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedMatMul {
    pub transpose: bool,
}

/// `aᵀ b` over the rows of each group: the gradient of the matrices of [`GroupedMatMul`]. Inputs: a `[S, M]`, b `[S,
/// N]`, the end of each group's rows (`i64[G]`). Output: `[G, M, N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedMatMulGrad {}

/// Scaled dot-product attention, `softmax(scale·q kᵀ + mask)·v`, without a stored score matrix; see [`attention`].
/// Inputs: query `[…, H, S, D]`, key `[…, G, T, D]`, value `[…, G, T, V]`; an optional mask that broadcasts to `[…, H, S,
/// T]`, of `bool` (true where a query sees a key) or added to the scores; with dropout, the counter (`i64`, one value);
/// with a part of it, the device's rank (`i64`, one value). H is a multiple of G: consecutive query heads share a key
/// head. Outputs: y `[…, H, S, V]`; log Σ e^score `[…, H, S]`, in `f32` for 16-bit inputs. The mask has no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    pub scale: f64,
    /// Query `i` sees the keys `j ≤ i` only.
    pub causal: bool,
    /// The result of a query whose scores are all -∞.
    pub empty: EmptyRow,
    /// Dropout of the weights, with the mask of [`Dropout`] over `[…, H, S, T]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<Dropout>,
    /// The weights are a device's part of those that the dropout is defined for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<DropoutShard>,
}

/// The result of an attention query that sees no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyRow {
    /// Zeros, as of `scaled_dot_product_attention` with a boolean mask.
    Zero,
    /// The mean of all values, as of a softmax over equal finite scores. Not for causal attention.
    Mean,
    /// NaN, as of a softmax over -∞.
    Nan,
}

/// A device's shard of dropped-out weights, in the runs of [`DropoutPart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropoutShard {
    /// Number of contiguous elements per run of a shard.
    pub run: usize,
    /// Size of the group; runs are assigned round-robin.
    pub devices: usize,
}

/// Gradient of [`Attention`]. Inputs: dy, query, key, value, y, log-sum-exp, then the optional inputs of the forward.
/// Outputs: gradients of query, key and value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGrad {
    pub forward: Attention,
}

/// LSTM over a sequence, with gate order i, f, g, o; see [`lstm`]. Inputs: x `[T, N, I]`, w_ih `[4H, I]`, w_hh `[4H,
/// H]`, b_ih and b_hh `[4H]`, h0 and c0 `[N, H]`. Outputs: y `[T, N, H]`; final h and c, `[N, H]`; gates `[T, N, 4H]`
/// and cells `[T, N, H]` of every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lstm {
    /// Processes steps in reverse. Step `t` of x still gives step `t` of y.
    pub reverse: bool,
}

/// Gradient of [`Lstm`]. Inputs: dy, final dh and dc, x, w_ih, w_hh, h0, c0, y, gates, cells. Outputs: dx, dw_ih,
/// dw_hh, db (of each bias), dh0, dc0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LstmGrad {
    pub reverse: bool,
}

/// GRU over a sequence, with gate order r, z, n; see [`gru`]. Inputs: x `[T, N, I]`, w_ih `[3H, I]`, w_hh `[3H, H]`,
/// b_ih and b_hh `[3H]`, h0 `[N, H]`. Outputs: y `[T, N, H]`; final h, `[N, H]`; gates and reset gate operand of every
/// step, `[T, N, 4H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gru {
    /// Processes steps in reverse. Step `t` of x still gives step `t` of y.
    pub reverse: bool,
    /// Applies the reset gate to the product of state and weight (as in PyTorch), otherwise to the state.
    pub reset_after: bool,
}

/// Gradient of [`Gru`]. Inputs: dy, final dh, x, w_ih, w_hh, h0, y, gates. Outputs: dx, dw_ih, dw_hh, db_ih, db_hh,
/// dh0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GruGrad {
    pub reverse: bool,
    pub reset_after: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    Tanh,
    /// `max(x, 0)`; the gradient at 0 is 0.
    Relu,
    Sigmoid,
}

/// Plain recurrent layer over a sequence; see [`rnn`]. Inputs: x `[T, N, I]`, w_ih `[H, I]`, w_hh `[H, H]`, b_ih and
/// b_hh `[H]`, h0 `[N, H]`. Outputs: y `[T, N, H]`; final h, `[N, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rnn {
    /// Processes steps in reverse. Step `t` of x still gives step `t` of y.
    pub reverse: bool,
    pub activation: Activation,
}

/// Gradient of [`Rnn`]. Inputs: dy, final dh, x, w_ih, w_hh, h0, y. Outputs: dx, dw_ih, dw_hh, db (of each bias), dh0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RnnGrad {
    pub reverse: bool,
    pub activation: Activation,
}

/// A sliding window; every list has one entry per spatial axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// At least 1.
    pub strides: Vec<usize>,
    pub pads_begin: Vec<usize>,
    pub pads_end: Vec<usize>,
    /// At least 1.
    pub dilations: Vec<usize>,
}

/// Cross-correlation `x [N, C, D…] ⋆ w [O, C/groups, K…] → [N, O, E…]`, zero-padded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv {
    pub window: Window,
    pub groups: usize,
}

/// Input gradient of [`Conv`], also transposed convolution. Inputs: `dy [N, O, E…]`, `w`. Output: `[N, C, D…]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvInputGrad {
    pub window: Window,
    pub groups: usize,
    /// `D…`, the spatial sizes of `x`.
    pub spatial: Vec<Dim>,
}

/// Weight gradient of [`Conv`]. Inputs: `dy [N, O, E…]`, `x [N, C, D…]`. Output: `[O, C/groups, K…]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvWeightGrad {
    pub window: Window,
    pub groups: usize,
    /// `K…`, the spatial sizes of `w`.
    pub kernel: Vec<usize>,
}

/// Maximum of each window, ignoring padding: `x [N, C, D…] → [N, C, E…]`. With `ceil`, a last window may start inside
/// the data and extend beyond the padding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPool {
    pub kernel: Vec<usize>,
    pub window: Window,
    /// Rounds the number of windows up.
    pub ceil: bool,
}

/// Gradient of [`MaxPool`]. Inputs: `x`, `dy`; output like `x`. Each `dy` goes to the first largest element of its
/// window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPoolGrad {
    pub forward: MaxPool,
}

/// Mean of each window, `x [N, C, D…] → [N, C, E…]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvgPool {
    pub kernel: Vec<usize>,
    pub window: Window,
    pub ceil: bool,
    /// Counts padding in the divisor, but not positions beyond it.
    pub count_padding: bool,
}

/// Gradient of [`AvgPool`]. Input: `dy`. Output: `[N, C, D…]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AvgPoolGrad {
    pub forward: AvgPool,
    pub spatial: Vec<Dim>,
}

/// The same elements in row-major order, with another shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    pub shape: Vec<Dim>,
}

/// Axis `i` of the result is axis `perm[i]` of the input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transpose {
    pub perm: Vec<usize>,
}

/// Broadcasts the input to `shape`, as in NumPy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Broadcast {
    pub shape: Vec<Dim>,
}

/// Elements `begin, begin+step, … < end` of every axis; `0 ≤ begin ≤ end ≤ size`, `step ≥ 1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    pub begin: Vec<Dim>,
    pub end: Vec<Dim>,
    pub step: Vec<usize>,
}

/// Pads each axis with `value`: around the input, and `interior` times between neighbours. `low` and `high` are not
/// negative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pad {
    pub low: Vec<Dim>,
    pub high: Vec<Dim>,
    pub interior: Vec<usize>,
    #[serde(with = "pad::any_float")]
    pub value: f64,
}

/// Concatenates all inputs along `axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concat {
    pub axis: usize,
}

/// Reverses the elements along `axes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flip {
    /// Sorted.
    pub axes: Vec<usize>,
}

/// `x [A…, S, B…]`, integer indices `[I…]` → `[A…, I…, B…]`: selects slices of `x` along `axis` (0 for an embedding). A
/// negative index counts from the end; an index out of range is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gather {
    pub axis: usize,
}

/// Gradient of [`Gather`]. Inputs: `dy [A…, I…, B…]`, indices `[I…]`. Output: `[A…, size, B…]`, the sums of the slices
/// per index, added in index order; zero elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScatterAdd {
    pub axis: usize,
    pub size: Dim,
}

/// `x [A…, S, B…]`, integer indices `[A…, I…]` → `[A…, I…, B…]`: a gather along axis `batch` with separate indices per
/// example. Indices are as in [`Gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchGather {
    /// Number of leading batch axes.
    pub batch: usize,
}

/// Gradient of [`BatchGather`]. Inputs: `dy [A…, I…, B…]`, indices `[A…, I…]`. Output: `[A…, size, B…]`, the sums of
/// the slices per index, added in index order; zero elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchScatterAdd {
    pub batch: usize,
    /// Size of the indexed axis, which follows the batch axes.
    pub size: Dim,
}

/// Combines slices of `x [A…, S, B…]` along `axis` with `updates [A…, I…, B…]` at integer indices `[I…]`, in index
/// order. Inputs: x, indices, updates. Indices are as in [`Gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scatter {
    pub kind: ScatterKind,
    pub axis: usize,
}

/// The operator that combines an update with the old value in [`Scatter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScatterKind {
    /// The last update of an index wins.
    Replace,
    Add,
    /// Product; no gradient.
    Mul,
    /// Maximum; the gradient is split equally among equal elements.
    Max,
    /// Minimum; the gradient is split equally among equal elements.
    Min,
}

/// The identity, with no gradient (`detach`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopGradient {}

/// `y_i = e^(x_i) / Σ e^(x_j)` along `axis`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Softmax {
    pub axis: usize,
}

/// Logarithm of [`Softmax`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSoftmax {
    pub axis: usize,
}

/// `y = (x - mean)/√(variance + epsilon)·scale + bias` over all axes from `axis` on. Inputs: x, scale, bias (both with
/// the shape of the normalised axes). Outputs: y; mean and 1/√(variance + epsilon), with size 1 on the normalised axes.
/// Beside an x of two bytes an element, scale, bias and statistics may be `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    pub axis: usize,
    /// Added to the biased variance.
    pub epsilon: f64,
}

/// Gradient of [`LayerNorm`]. Inputs: dy, x, scale, mean, rstd. Outputs: dx, dscale, dbias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormGrad {
    pub axis: usize,
}

/// Batch normalisation with batch statistics. Inputs: x `[N, C, D…]`, scale `[C]`, bias `[C]`. Outputs: y; mean, biased
/// variance and 1/√(variance + epsilon), each `[C]`. Element types are those of [`LayerNorm`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    pub epsilon: f64,
}

/// Gradient of [`BatchNorm`]. Inputs: dy, x, scale, mean, rstd. Outputs: dx, dscale, dbias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormGrad {}

/// `y = x/(1 - ratio)` where the mask keeps an element, else 0. Inputs: x, counter (`i64`, one value). The mask is a
/// function of stream, counter and element index; see [`dropout`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Drop probability, 0 to 1.
    pub ratio: f64,
    /// Distinguishes the dropouts of a model.
    pub stream: u64,
}

/// Mean cross-entropy of logits against class indices. Inputs: logits (classes along `axis`), integer target (the shape
/// without `axis`). Outputs: the scalar loss, averaged over targets other than `ignore`; log Σ e^logit with the
/// target's shape. If all targets are ignored, loss and gradients are 0 (PyTorch's loss is NaN).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropy {
    pub axis: usize,
    pub ignore: Option<i64>,
    /// True if the outputs are `f32` though the logits have a two-byte type.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wide: bool,
}

/// Gradient of [`CrossEntropy`] for the logits. Inputs: dloss (scalar), logits, target, log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropyGrad {
    pub axis: usize,
    /// The ignored target value, as PyTorch's `ignore_index`.
    pub ignore: Option<i64>,
    /// As [`CrossEntropy::wide`]. The gradient has the type of the logits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wide: bool,
}

/// All-reduce of terms over a tensor-parallel group. See [`collective`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllReduce {
    pub kind: ReduceKind,
    pub devices: usize,
}

/// Reduce-scatter: sums the devices' terms; each device gets its shard of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReduceScatter {
    /// Sharding of the full tensor before the op.
    pub cut: SplitDim,
    pub devices: usize,
}

/// All-gather: the full tensor on every device, from their shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllGather {
    /// Sharding of the full tensor before the op.
    pub cut: SplitDim,
    pub devices: usize,
}

/// All-to-all: from one sharding to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllToAll {
    pub from: SplitDim,
    pub to: SplitDim,
    pub devices: usize,
}

/// This device's shard of a replicated tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    pub cut: SplitDim,
    pub devices: usize,
}

/// [`Dropout`] of a device's shard of a tensor, with the mask of the full tensor. Inputs: x, counter, and the device's
/// rank in the group (`i64`, one value).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DropoutPart {
    pub whole: Dropout,
    /// Number of contiguous elements per run of a shard.
    pub run: usize,
    /// Size of the group; runs are assigned round-robin.
    pub devices: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Value {
    pub node: NodeId,
    pub output: u32,
}
