//! The published runs: one row per configuration of a model on a cluster.

use std::collections::BTreeMap;

/// A published run.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: String,
    pub model: String,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub key_heads: u64,
    /// Width of the MLP, or of an expert.
    pub ffn: u64,
    pub sequence: u64,
    pub vocabulary: u64,
    pub gpu: String,
    pub gpus: u64,
    pub tensor: u64,
    pub pipeline: u64,
    pub data: u64,
    /// Devices over which experts are distributed; 1 without experts.
    pub expert: u64,
    /// The ZeRO stage: 3 with FSDP, 1 with Megatron-LM's distributed optimizer.
    pub zero: u32,
    /// Chunks per device; `None` if not published.
    pub chunks: Option<u64>,
    /// Samples per micro-batch; `None` if not published.
    pub micro_batch: Option<u64>,
    pub batch: u64,
    pub precision: String,
    /// `None` if not published.
    pub recompute: Option<Recompute>,
    /// Sequence parallelism in tensor-parallel groups.
    pub sequence_parallel: bool,
    /// Measured seconds per iteration; `None` for a row about memory.
    pub seconds: Option<f64>,
    /// Bytes of weights, gradients and optimizer state, and of activations, if the row is about memory.
    pub bytes: Option<[f64; 2]>,
}

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    None,
    /// The products and the softmax of attention.
    Attention,
    /// Every second matrix product of a block, and all of its ops that are neither products nor attention, as torchtitan's
    /// selective option does.
    Operations,
    /// Every block.
    Full,
}

/// Vocabulary of the models whose source does not state it: GPT-2's, padded as Megatron-LM does.
const VOCABULARY: u64 = 51_200;

const GIB: f64 = (1u64 << 30) as f64;

fn table(text: &str) -> Vec<BTreeMap<&str, &str>> {
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap_or_default().split('\t').collect();
    lines.map(|line| head.iter().copied().zip(line.split('\t')).collect()).collect()
}

/// The number at the start of a text.
fn leading(text: &str) -> Option<u64> {
    text.split(|c: char| !c.is_ascii_digit()).next().and_then(|number| number.parse().ok())
}

fn recompute(text: &str) -> Option<Recompute> {
    Some(match text {
        "not published" => return None,
        text if text.starts_with("full") => Recompute::Full,
        text if text.starts_with("attention") => Recompute::Attention,
        "selective" => Recompute::Operations,
        _ => Recompute::None,
    })
}

/// The rows of `runs.tsv`.
pub fn runs(text: &str) -> Vec<Row> {
    let row = |fields: BTreeMap<&str, &str>| {
        let number = |name: &str| fields[name].parse::<u64>().ok();
        let required = |name: &str| number(name).unwrap_or_else(|| panic!("`{name}` of {} is a number", fields["id"]));
        let mut row = Row {
            id: fields["id"].to_string(),
            model: fields["model"].to_string(),
            layers: required("layers"),
            hidden: required("hidden"),
            heads: required("heads"),
            key_heads: required("kv_heads"),
            ffn: leading(fields["ffn"]).unwrap_or_else(|| panic!("`ffn` of {} is a number", fields["id"])),
            sequence: required("seq"),
            vocabulary: required("vocab"),
            gpu: fields["gpu"].to_string(),
            gpus: required("gpus"),
            tensor: required("tp"),
            pipeline: required("pp"),
            data: required("dp"),
            expert: fields["note"].strip_prefix("experts over ").and_then(leading).unwrap_or(1),
            zero: match number("fsdp") {
                Some(shards) if shards > 0 => 3,
                // Overlapped gathers of parameters need the distributed optimizer, which Megatron-Bridge uses too.
                _ => u32::from(
                    ["overlap of data-parallel", "experts over"].iter().any(|at| fields["note"].starts_with(at)),
                ),
            },
            chunks: number("chunks"),
            micro_batch: number("micro_batch"),
            batch: required("global_batch"),
            precision: fields["precision"].split(' ').next().unwrap_or_default().to_string(),
            recompute: recompute(fields["recompute"]),
            sequence_parallel: fields["seq_parallel"] == "yes",
            seconds: None,
            bytes: None,
        };
        // Tokens per second do not depend on how operations are counted.
        let tokens = fields["measured"].split_once('(').filter(|(_, text)| text.ends_with(" tokens/s)"));
        let (text, unit) = tokens.map_or((fields["measured"], fields["unit"]), |(_, text)| (text, "tokens/s per GPU"));
        let measured = text.split(' ').next().and_then(|text| text.parse::<f64>().ok());
        row.seconds = measured.and_then(|measured| row.seconds_of(measured, unit));
        if fields["unit"].starts_with("GiB: ") {
            let parts = fields["measured"].split(" + ").map(|text| text.parse::<f64>().ok().map(|gib| gib * GIB));
            row.bytes = parts.collect::<Option<Vec<f64>>>().and_then(|parts| parts.try_into().ok());
        }
        row
    };
    table(text).into_iter().map(row).collect()
}

/// The rows of `vtrain.tsv`.
pub fn vtrain(text: &str) -> Vec<Row> {
    let row = |fields: BTreeMap<&str, &str>| {
        let required = |name: &str| fields[name].parse::<u64>().unwrap_or_else(|_| panic!("`{name}` is a number"));
        let hidden = required("hidden");
        Row {
            id: fields["id"].to_string(),
            model: fields["model"].to_string(),
            layers: required("layers"),
            hidden,
            heads: required("heads"),
            key_heads: required("heads"),
            ffn: 4 * hidden,
            sequence: required("seq"),
            vocabulary: VOCABULARY,
            gpu: "a100-80".to_string(),
            gpus: required("gpus"),
            tensor: required("tp"),
            pipeline: required("pp"),
            data: required("dp"),
            expert: 1,
            zero: 0,
            chunks: Some(required("vpp/chunks")),
            micro_batch: Some(required("microbatch")),
            batch: required("global_batch"),
            precision: "fp16".to_string(),
            recompute: recompute(fields["recompute"]),
            sequence_parallel: false,
            seconds: fields["measured"].parse::<f64>().ok().map(|ms| ms / 1e3),
            bytes: None,
        }
    };
    table(text).into_iter().map(row).collect()
}

/// The dense rows of `runs-2.tsv` in bf16 without context parallelism, if their shapes were published.
pub fn newer_runs(text: &str) -> Vec<Row> {
    table(text).into_iter().filter_map(newer_run).collect()
}

fn newer_run(fields: BTreeMap<&str, &str>) -> Option<Row> {
    let number = |name: &str| fields[name].parse::<u64>().ok();
    let (model, note) = (fields["model"], fields["note"]);
    let is_dense = ["MPT", "InternLM", "GPT-3", "Llama"].iter().any(|name| model.starts_with(name));
    if !is_dense || fields["precision"] != "bf16" || fields["cp"] != "1" || model.contains("LoRA") {
        return None;
    }
    let (hidden, heads) = (number("hidden")?, number("heads")?);
    let after = |word: &str| model.split(word).nth(1).and_then(leading);
    let (ffn, key_heads) = match hidden {
        _ if model.contains("ffn ") => (after("ffn ")?, after("GQA ").unwrap_or(heads)),
        4096 if model.starts_with("Llama") => (14_336, 8),
        8192 if model.starts_with("Llama") => (28_672, 8),
        16_384 if model.starts_with("Llama") => (53_248, 8),
        4096 if model.starts_with("InternLM") => (11_008, heads),
        _ if model.starts_with("MPT") || model.starts_with("GPT-3") => (4 * hidden, heads),
        _ => return None,
    };
    let mut row = Row {
        id: fields["id"].to_string(),
        model: model.to_string(),
        layers: number("layers")?,
        hidden,
        heads,
        key_heads,
        ffn,
        sequence: number("seq")?,
        vocabulary: number("vocab")?,
        gpu: fields["gpu_kind"].to_string(),
        gpus: number("gpus")?,
        tensor: number("tp")?,
        pipeline: number("pp")?,
        data: number("dp")?,
        expert: 1,
        // Recipes of NVIDIA's framework use the distributed optimizer.
        zero: if note.contains("FSDP FULL_SHARD") || note.contains("FSDP True") { 3 } else { 1 },
        chunks: Some(number("vpp/chunks").unwrap_or(1)),
        micro_batch: number("microbatch"),
        batch: number("global_batch")?,
        precision: "bf16".to_string(),
        recompute: match fields["recompute"] {
            "not stated" => None,
            text => recompute(text),
        },
        sequence_parallel: number("tp")? > 1 && fields["source"].starts_with("NVIDIA"),
        seconds: None,
        bytes: None,
    };
    let measured = fields["measured"].parse::<f64>().ok()?;
    row.seconds = row.seconds_of(measured, fields["unit"]);
    Some(row)
}

impl Row {
    /// The model of the zoo.
    pub fn zoo(&self) -> &'static str {
        match self.model.to_lowercase() {
            model if ["llama", "internlm"].iter().any(|name| model.starts_with(name)) => "llama",
            model if model.starts_with("gpt-oss") => "gpt-oss",
            _ => "gpt",
        }
    }

    /// Devices that share a replica's tensors or experts.
    pub fn group(&self) -> u64 {
        self.tensor.max(self.expert)
    }

    /// Operations of one iteration without recomputation, as Megatron-LM counts them (Narayanan et al., SC 2021,
    /// equation 3, with 72 in place of 96).
    fn operations(&self) -> f64 {
        let [b, s, l, h, v] =
            [self.batch, self.sequence, self.layers, self.hidden, self.vocabulary].map(|size| size as f64);
        72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h))
    }

    /// The same with the forward repeated: the paper's equation 3.
    fn operations_with_recomputation(&self) -> f64 {
        let [b, s, l, h, v] =
            [self.batch, self.sequence, self.layers, self.hidden, self.vocabulary].map(|size| size as f64);
        96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h))
    }

    /// Seconds per iteration of a figure in this unit.
    fn seconds_of(&self, measured: f64, unit: &str) -> Option<f64> {
        let gpus = self.gpus as f64;
        match unit {
            unit if unit.starts_with("TFLOP/s per GPU, recomputation counted") => {
                Some(self.operations_with_recomputation() / (measured * 1e12 * gpus))
            }
            unit if unit.starts_with("model TFLOP/s per GPU") => Some(self.operations() / (measured * 1e12 * gpus)),
            unit if unit.starts_with("seconds per iteration") || unit == "s/iteration" => Some(measured),
            unit if unit.starts_with("tokens/s per GPU") => {
                Some((self.batch * self.sequence) as f64 / (measured * gpus))
            }
            _ => None,
        }
    }
}
