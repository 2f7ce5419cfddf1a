//! Attention without the score matrix, in tiles (Dao, FlashAttention-2, 2023): one block per tile of queries, and for the
//! gradients of keys and values one per tile of keys. Sums have a fixed order.
//!
//! Elements of 16 bits are multiplied on tensor cores, from compute capability 8.0 on, and weights are rounded to 16 bits
//! for that. Other types are multiplied and added in their own precision.

use super::draft::{KernelBuilder, PACK_BYTES};
use super::element::{accumulator, compute_type, literal, load, storage_type, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::movement::shard_element;
use super::offsets::{Walk, offsets};
use crate::device::layout::{TensorLayout, is_half};
use compiler::op::attention::{COARSE, Extras};
use compiler::op::{Attention, AttentionGrad, DropoutShard, EmptyRow};
use compiler::tensor::DType;
use std::fmt::Write;

const TILES: &str = include_str!("attention/tiles.cu");
const TENSOR_CORES: &str = include_str!("attention/tensor_cores.cu");
const FUSED_MULTIPLY_ADD: &str = include_str!("attention/fused_multiply_add.cu");
const FORWARD: &str = include_str!("attention/forward.cu");
const SHARES: &str = include_str!("attention/shares.cu");
const GRADIENT: &str = include_str!("attention/gradient.cu");

/// Rows of a tile that one warp computes.
const WARP_ROWS: usize = 16;

/// Bytes of shared memory that every block of every GPU may have.
const SHARED_BYTES: usize = 48 << 10;

struct Pairs<'a> {
    op: Attention,
    dtype: DType,
    /// Leading axes, heads, queries and keys.
    shape: Vec<usize>,
    group_size: usize,
    depth: usize,
    width: usize,
    mask: Option<&'a TensorLayout>,
    extras: Extras,
    max_elements: usize,
}

/// The tiles of a kernel.
#[derive(Clone, Copy)]
struct Tiles {
    /// Number of warps; each has [`WARP_ROWS`] rows.
    warps: usize,
    columns: usize,
    /// Columns of queries and keys, and of values, that are in shared memory at once.
    chunks: [usize; 2],
    /// Bytes of shared memory.
    shared: usize,
}

/// What a kernel computes: the rows of its tiles are queries, or keys for their own gradient and that of the values.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    QueryGradient,
    KeyGradient,
}

/// Columns of a chunk: a tile has few enough that a warp's results stay in registers.
fn chunk(dtype: DType, size: usize) -> usize {
    let max_size = if is_half(dtype) { 128 } else { 256 / dtype.size() };
    size.div_ceil(size.div_ceil(max_size)).next_multiple_of(16)
}

impl Tiles {
    fn new(pairs: &Pairs<'_>, pass: Pass) -> Tiles {
        let (dtype, sum) = (pairs.dtype, accumulator(pairs.dtype).size());
        let [rows, columns] = match pass {
            Pass::KeyGradient => [pairs.keys(), pairs.queries()],
            _ => [pairs.queries(), pairs.keys()],
        };
        let chunks = [pairs.depth, pairs.width].map(|size| chunk(dtype, size));
        let lines = chunks.map(|chunk| chunk * dtype.size() + PACK_BYTES);
        let max_columns = match (pass, is_half(dtype)) {
            (Pass::Forward, true) => 64,
            (Pass::Forward, false) => 32,
            _ => 128 / sum,
        };
        let tiles = |warps: usize, columns: usize| {
            let rows = warps * WARP_ROWS;
            let staged = if is_half(dtype) { 0 } else { rows * (columns + 4) * sum };
            let shared = match pass {
                Pass::Forward => rows * lines[0] + columns * (lines[0] + lines[1]) + staged,
                _ => (rows + columns) * (lines[0] + lines[1]) + 3 * columns * sum + staged,
            };
            Tiles { warps, columns, chunks, shared }
        };
        let fits = |count: usize, tile: usize, smallest: usize| tile == smallest || tile < 2 * count;
        [4, 2, 1]
            .into_iter()
            .filter(|warps| fits(rows, warps * WARP_ROWS, WARP_ROWS))
            .flat_map(|warps| [64, 32, 16].map(|columns| tiles(warps, columns)))
            .filter(|tiles| tiles.columns <= max_columns && fits(columns, tiles.columns, 16))
            .filter(|tiles| tiles.shared <= SHARED_BYTES)
            .max_by_key(|tiles| (tiles.warps * tiles.columns, tiles.warps))
            .expect("the smallest tiles fit")
    }
}

impl<'a> Pairs<'a> {
    fn new(op: &Attention, fixed: usize, first: usize, inputs: &'a [TensorLayout]) -> Option<Pairs<'a>> {
        let [query, key, value] = inputs.get(first..first + 3)? else { return None };
        let extras = op.extras(fixed, inputs.len()).ok()?;
        let head_axis = query.shape.len() - 3;
        let mut shape = query.shape[..head_axis + 2].to_vec();
        shape.push(key.shape[head_axis + 1]);
        let (depth, width) = (query.shape[head_axis + 2], value.shape[head_axis + 2]);
        let group_size = query.shape[head_axis] / key.shape[head_axis];
        let scores: usize = shape.iter().product();
        let max_elements = inputs
            .iter()
            .map(TensorLayout::len)
            .chain([scores, scores / shape[head_axis + 2] * width.max(32)])
            .max()?;
        let mask = extras.mask.map(|at| &inputs[at]);
        Some(Pairs { op: *op, dtype: query.dtype, shape, group_size, depth, width, mask, extras, max_elements })
    }

    fn sums(&self) -> DType {
        accumulator(self.dtype)
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

    /// Heads of queries, over the leading axes.
    fn heads(&self) -> usize {
        self.shape[..self.shape.len() - 2].iter().product()
    }

    /// A kernel that reads query, key and value, inputs `first` and following, and what is optional.
    fn builder(&self, first: usize, tiles: &Tiles, pass: Pass) -> KernelBuilder {
        let mut builder = KernelBuilder::new(self.max_elements);
        builder.define(&self.definitions(tiles, pass));
        for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
            builder.add_input(name, self.dtype, At::input(first + i));
        }
        match (self.mask, self.extras.mask) {
            (Some(mask), Some(at)) => builder.add_input("mask", mask.dtype, At::input(at)),
            _ => builder.add("const u8* const mask = 0;"),
        }
        match (self.op.dropout, self.extras.counter) {
            (Some(dropout), Some(at)) => {
                builder.add_input("counter", DType::I64, At::input(at));
                builder.add(&format!("const u64 seed = mix(mix({}ull) ^ (u64)counter[0]);", dropout.stream));
            }
            _ => builder.add("const u64 seed = 0;"),
        }
        match self.extras.device {
            Some(at) => builder.add_input("device", DType::I64, At::input(at)),
            None => builder.add("const i64* const device = 0;"),
        }
        for (name, value) in [
            ("NEVER", f64::NEG_INFINITY),
            ("SCALE", self.op.scale),
            ("EMPTY_WEIGHT", self.op.empty.weight(self.keys())),
            ("COARSE", COARSE),
        ] {
            builder.add(&format!("const Sum {name} = {};", self.number(value)));
        }
        builder
    }

    /// What comes before a kernel: types, numbers, functions of the op, and tiles.
    fn definitions(&self, tiles: &Tiles, pass: Pass) -> String {
        let (sums, element) = (self.sums(), storage_type(self.dtype));
        let [heads, row_tiles, chunks] = self.grid(tiles, pass);
        let mut text = format!("typedef {element} Element;\ntypedef {} Sum;\n", compute_type(sums));
        for (name, value) in [
            ("QUERIES", self.queries()),
            ("KEYS", self.keys()),
            ("EACH", self.group_size),
            ("DEPTH", self.depth),
            ("WIDTH", self.width),
            ("TILES", row_tiles),
            ("HEADS", heads),
            ("CHUNKS", chunks),
        ] {
            let _ = writeln!(text, "const at {name} = {value};");
        }
        for (name, value) in [
            ("ROWS", tiles.warps * WARP_ROWS),
            ("COLUMNS", tiles.columns),
            ("DEPTH_CHUNK", tiles.chunks[0]),
            ("WIDTH_CHUNK", tiles.chunks[1]),
            ("SHARED_PACKS", tiles.shared / PACK_BYTES),
        ] {
            let _ = writeln!(text, "const u32 {name} = {value};");
        }
        for (name, value) in [
            ("IS_CAUSAL", self.op.causal),
            ("IS_MASKED", self.mask.is_some()),
            ("DROPS", self.op.dropout.is_some()),
            ("BY_KEYS", pass == Pass::KeyGradient),
            // A query that sees no key is NaN for all keys, also for those after it.
            ("EMPTY_ROWS_SEE_ALL", self.op.empty == EmptyRow::Nan && self.mask.is_some()),
        ] {
            let _ = writeln!(text, "const bool {name} = {value};");
        }
        let _ = writeln!(text, "DEVICE Element stored(Sum x) {{ return {}; }}", store(self.dtype, "x"));
        text += &self.mask_functions();
        let _ = writeln!(
            text,
            "DEVICE Sum kept(at row, at key, u64 seed, const i64* device) {{ return {}; }}",
            self.dropout_factor()
        );
        text + TILES + if is_half(self.dtype) { TENSOR_CORES } else { FUSED_MULTIPLY_ADD }
    }

    /// The functions `mask_place`, the place of a row in the mask, and `masked`, a score with the mask applied.
    fn mask_functions(&self) -> String {
        let Some(mask) = self.mask else {
            return "DEVICE at mask_place(at) { return 0; }\n\
                    DEVICE Sum masked(Sum s, const u8*, at, at) { return s; }\n"
                .into();
        };
        let mut walk = Walk::broadcast(&mask.shape, &self.shape);
        let step = walk.steps.pop().unwrap_or_default();
        let (lines, at) = offsets("m", "row", &self.shape[..self.shape.len() - 1], &[walk]);
        let element = load(mask.dtype, &format!("mask[place + key * (at){step}]"));
        let value = match mask.dtype {
            DType::Bool => format!("{element} ? s : {}", self.number(f64::NEG_INFINITY)),
            _ => format!("s + (Sum){element}"),
        };
        format!(
            "DEVICE at mask_place(at row) {{\n{lines}return {};\n}}\n\
             DEVICE Sum masked(Sum s, const {}* mask, at place, at key) {{ return {value}; }}\n",
            at[0],
            storage_type(mask.dtype)
        )
    }

    /// The dropout factor of query `row` and `key`.
    fn dropout_factor(&self) -> String {
        let Some(dropout) = self.op.dropout else { return self.number(1.0) };
        let least = (dropout.ratio * (1u64 << 53) as f64) as u64;
        let (kept_factor, dropped_factor) = (self.number(dropout.scale()), self.number(0.0));
        let index = format!("((u64)row * {}ull + (u64)key)", self.keys());
        let element =
            self.op.part.map_or(index.clone(), |DropoutShard { run, devices }| shard_element(&index, run, devices));
        format!("(mix(seed ^ {element}) >> 11 >= {least}ull ? {kept_factor} : {dropped_factor})")
    }

    /// Heads, tiles of rows, and chunks of the results' columns. A block has one of each.
    fn grid(&self, tiles: &Tiles, pass: Pass) -> [usize; 3] {
        let [depth_chunks, width_chunks] =
            [(self.depth, 0), (self.width, 1)].map(|(size, at)| size.div_ceil(tiles.chunks[at]));
        let (heads, rows, chunks) = match pass {
            Pass::Forward => (self.heads(), self.queries(), width_chunks),
            Pass::QueryGradient => (self.heads(), self.queries(), depth_chunks),
            Pass::KeyGradient => (self.heads() / self.group_size, self.keys(), depth_chunks.max(width_chunks)),
        };
        [heads, rows.div_ceil(tiles.warps * WARP_ROWS), chunks]
    }

    /// A launch over all tiles.
    fn launch(&self, mut builder: KernelBuilder, text: &str, tiles: &Tiles, pass: Pass) -> Launch {
        builder.add(text);
        builder.launch(self.grid(tiles, pass).iter().product(), 32 * tiles.warps as u32)
    }
}

pub fn kernel(op: &Attention, inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let pairs = Pairs::new(op, 3, 0, inputs)?;
    let tiles = Tiles::new(&pairs, Pass::Forward);
    let mut builder = pairs.builder(0, &tiles, Pass::Forward);
    builder.add_output("y", pairs.dtype, At::output(0));
    builder.add_output("log_sums", pairs.sums(), At::output(1));
    Some(LaunchPlan::of(pairs.launch(builder, FORWARD, &tiles, Pass::Forward)))
}

pub fn grad(op: &AttentionGrad, inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let pairs = Pairs::new(&op.forward, 6, 1, inputs)?;
    let rows = pairs.heads() * pairs.queries();
    let mut launch_plan = LaunchPlan::default();
    let [shares, norms] = [(); 2].map(|()| launch_plan.take(rows * pairs.sums().size()));
    let builder = |pass| {
        let tiles = Tiles::new(&pairs, pass);
        let mut builder = pairs.builder(1, &tiles, pass);
        builder.add_input("dy", pairs.dtype, At::input(0));
        builder.add_input("log_sums", pairs.sums(), At::input(5));
        (tiles, builder)
    };
    let (_, mut first) = builder(Pass::QueryGradient);
    first.add_input("y", pairs.dtype, At::input(4));
    first.add_output("shares", pairs.sums(), shares);
    first.add_output("norms", pairs.sums(), norms);
    launch_plan.launches.push(first.each(32 * rows, SHARES));
    for (pass, outputs) in [(Pass::QueryGradient, &[("da", 0)][..]), (Pass::KeyGradient, &[("da", 1), ("db", 2)])] {
        let (tiles, mut builder) = builder(pass);
        builder.add_input("shares", pairs.sums(), shares);
        builder.add_input("norms", pairs.sums(), norms);
        for (name, output) in outputs {
            builder.add_output(name, pairs.dtype, At::output(*output));
        }
        if pass == Pass::QueryGradient {
            builder.add("Element* const db = 0;");
        }
        launch_plan.launches.push(pairs.launch(builder, GRADIENT, &tiles, pass));
    }
    Some(launch_plan)
}
