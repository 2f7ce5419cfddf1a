//! Rows of tensors, or parts of rows, one block each. Threads pass over a row in packs of adjacent elements. A row that
//! fits is loaded once and stays in registers between passes.

use super::draft::{PACK_BYTES, THREADS};
use super::element::{load, storage_type};
use compiler::tensor::DType;
use std::fmt::Write;

/// Most packs of an operand that a thread keeps.
const MOST_KEPT: usize = 4;

const MOST_THREADS: usize = 512;

pub struct Rows {
    /// Elements of a row.
    size: usize,
    /// The place of the pack with first element `k0`, relative to the first element of the row.
    place: String,
    /// Elements of a pack.
    width: usize,
    pub threads: u32,
    /// Packs of a thread, if they stay in registers.
    thread_packs: Option<usize>,
    /// Whether rows start within packs.
    is_ragged: bool,
    /// Whether a pass is from element `first` to before element `last`.
    is_part: bool,
}

/// An operand of a pass. Its element in compute type is `NAME_k`.
pub struct Read<'a> {
    pub name: &'a str,
    pub dtype: DType,
    /// Index of the first element.
    pub from: &'a str,
    /// Whether later passes read it again.
    pub is_kept: bool,
}

/// A result of a pass. Its stored element is `NAME_k`.
pub struct Written<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub from: &'a str,
}

impl Rows {
    /// Rows in operands of which the largest elements have so many bytes.
    pub fn new(size: usize, step: usize, bytes: usize) -> Rows {
        let fits = |width: &usize| step == 1 && width * bytes <= PACK_BYTES && size.is_multiple_of(*width);
        let width = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let packs = size / width;
        let threads = packs.div_ceil(MOST_KEPT).next_power_of_two().clamp(32, MOST_THREADS);
        let thread_packs = packs.div_ceil(threads);
        Rows {
            size,
            place: format!("k0 * {step}"),
            width,
            threads: threads as u32,
            thread_packs: (thread_packs <= MOST_KEPT).then_some(thread_packs),
            is_ragged: false,
            is_part: false,
        }
    }

    /// Parts of rows that consist of runs of `run` elements, `stride` elements apart. Nothing is kept.
    pub fn parts((size, run, stride): (usize, usize, usize), bytes: usize) -> Rows {
        let rows = Rows::new(run, 1, bytes);
        let place = format!("(k0 / (at){run} * (at){stride} + k0 % (at){run})");
        Rows { size, place, threads: THREADS, thread_packs: None, is_part: true, ..rows }
    }

    /// The place of the pack with first element `k0`, relative to the first element of the row.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Elements of a pack.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adjacent rows of whole tensors of `total` elements. Packs may cross their ends, so all operands are tensors of
    /// this shape and element size.
    pub fn adjacent(size: usize, total: usize, bytes: usize) -> Rows {
        let rows = Rows::new(size, 1, bytes);
        let width = [8, 4, 2].into_iter().find(|width| width * bytes <= PACK_BYTES && total.is_multiple_of(*width));
        match width {
            Some(width) if width > rows.width && !rows.fit() => Rows { width, is_ragged: true, ..rows },
            _ => rows,
        }
    }

    /// Whether rows stay in registers.
    pub fn fit(&self) -> bool {
        self.thread_packs.is_some()
    }

    /// Declares a value of every element of a thread's packs, in registers. `None` if rows do not fit.
    pub fn cells(&self, name: &str, kind: &str, start: &str) -> Option<String> {
        let count = self.thread_packs? * self.width;
        Some(format!(
            "{kind} {name}[{count}];\n#pragma unroll\nfor (int c = 0; c < {count}; c++) {name}[c] = {start};\n"
        ))
    }

    /// The cell of the element of a pass.
    pub fn cell(&self, name: &str) -> String {
        format!("{name}[j * {} + e]", self.width)
    }

    /// A loop over the elements `k` of a row. The first pass loads what is kept.
    pub fn pass(&self, is_first: bool, reads: &[Read<'_>], written: &[Written<'_>], lines: &str) -> String {
        let Rows { size, ref place, width, threads, thread_packs, is_ragged, is_part } = *self;
        let (mut text, mut packs, mut elements, mut stores) =
            (String::new(), String::new(), String::new(), String::new());
        for Read { name, dtype, from, is_kept } in reads {
            let pack = format!("Pack<{}, {width}>", storage_type(*dtype));
            let load_pack = format!("*(const {pack}*)({name} + ({from} + {place}))");
            let _ = match thread_packs {
                Some(count) if *is_kept && is_first => {
                    let _ = writeln!(text, "{pack} {name}_kept[{count}];");
                    writeln!(packs, "{name}_kept[j] = {load_pack};\n{pack}& {name}_p = {name}_kept[j];")
                }
                Some(_) if *is_kept => writeln!(packs, "{pack}& {name}_p = {name}_kept[j];"),
                _ => writeln!(packs, "{pack} {name}_p = {load_pack};"),
            };
            let _ = writeln!(elements, "auto {name}_k = {};", load(*dtype, &format!("{name}_p.of[e]")));
        }
        for Written { name, dtype, from } in written {
            let pack = format!("Pack<{}, {width}>", storage_type(*dtype));
            let _ = writeln!(packs, "{pack} {name}_p;");
            let _ = writeln!(elements, "{}& {name}_k = {name}_p.of[e];", storage_type(*dtype));
            let store = format!("*({pack}*)({name} + ({from} + {place})) = {name}_p;\n");
            stores.push_str(&match is_ragged {
                false => store,
                true => format!(
                    "if (k0 < (at){size} && (at){size} - k0 >= {width}) {store}else for (int e = 0; e < {width}; e++) \
                     if (k0 + e < (at){size}) {name}[{from} + k0 + e] = {name}_p.of[e];\n"
                ),
            });
        }
        let loop_head = match thread_packs {
            Some(count) => format!(
                "#pragma unroll\nfor (int j = 0; j < {count}; j++) {{\nat k0 = (j * {threads} + threadIdx.x) * {width};\n\
                 if (k0 >= (at){size}) break;\n"
            ),
            None if is_ragged => format!(
                "for (at u = threadIdx.x * {width}; u < (at){size} + from % {width}; u += {threads} * {width}) {{\nat k0 = u - from % {width};\n"
            ),
            None if is_part => {
                format!("for (at k0 = first + threadIdx.x * {width}; k0 < last; k0 += {threads} * {width}) {{\n")
            }
            None => format!("for (at k0 = threadIdx.x * {width}; k0 < (at){size}; k0 += {threads} * {width}) {{\n"),
        };
        // Numbers before a row wrap around.
        let within = if is_ragged { format!("if (k >= (at){size}) continue;\n") } else { String::new() };
        format!(
            "{text}{loop_head}{packs}#pragma unroll\nfor (int e = 0; e < {width}; e++) {{\nat k = k0 + e;\n{within}{elements}{lines}\n}}\n{stores}}}\n"
        )
    }
}
