//! Published figures, and results of released programs on their own published inputs.

use compiler::cluster::Cluster;
use compiler::cluster::read::levels;

/// A problem with a known result.
pub struct Golden {
    /// File name of the profile without `.graph.txt`.
    pub profile: &'static str,
    /// Interconnect levels, innermost first.
    pub levels: &'static str,
    pub minibatch_ms: f64,
}

impl Golden {
    pub fn cluster(&self) -> Cluster {
        levels(self.levels).expect("the levels of this table can be read")
    }
}

/// Results of PipeDream's released optimizer on its own profiles, activation compression 1: Narayanan et al.,
/// "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1; profiles and optimizer from
/// msr-fiddle/pipedream.
pub const PIPEDREAM: [Golden; 12] = [
    Golden { profile: "vgg16", levels: "4:1.25GB/s", minibatch_ms: 176.349 },
    Golden { profile: "vgg16", levels: "8:3.125GB/s", minibatch_ms: 93.661 },
    Golden { profile: "vgg16", levels: "16:1.25GB/s", minibatch_ms: 54.795 },
    Golden { profile: "vgg16", levels: "16:3.125GB/s", minibatch_ms: 45.525 },
    Golden { profile: "alexnet", levels: "4:1.25GB/s", minibatch_ms: 32.461 },
    Golden { profile: "alexnet", levels: "16:1.25GB/s", minibatch_ms: 15.099 },
    Golden { profile: "gnmt", levels: "4:1.25GB/s", minibatch_ms: 25.868 },
    Golden { profile: "resnet50", levels: "4:1.25GB/s", minibatch_ms: 151.993 },
    Golden { profile: "resnet50", levels: "16:1.25GB/s", minibatch_ms: 43.848 },
    Golden { profile: "vgg16", levels: "4:10GB/s,4:1.25GB/s", minibatch_ms: 67.134 },
    Golden { profile: "vgg16", levels: "8:40GB/s,2:3.125GB/s", minibatch_ms: 65.767 },
    Golden { profile: "resnet50", levels: "4:10GB/s,4:1.25GB/s", minibatch_ms: 43.208 },
];

/// The same optimizer where its outer stages must use whole servers, but ours need not.
pub const WHOLE_SERVERS: [Golden; 2] = [
    Golden { profile: "vgg16", levels: "8:40GB/s,2:3.125GB/s", minibatch_ms: 65.767 },
    Golden { profile: "alexnet", levels: "8:40GB/s,2:3.125GB/s", minibatch_ms: 9.65 },
];

/// A device placement instance with its optimal contiguous placement.
pub struct Optimum {
    /// Folder and file name without `.json`.
    pub instance: &'static str,
    /// Maximum device load, in the file's unit.
    pub load: f64,
    /// True if the optimum also uses the file's CPU as a device; it is then planned with it.
    pub has_cpu: bool,
}

/// Optimal maximum loads of contiguous placements: Tarnawski, Phanishayee, Devanur, Mahajan, Paravecino, "Efficient
/// Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, section 6 and appendix, throughput
/// maximisation; instances from msr-fiddle/dnn-partitioning.
pub const PLACEMENTS: [Optimum; 8] = [
    Optimum { instance: "LayerGraphs/bert24_inference", load: 17.7899, has_cpu: false },
    Optimum { instance: "LayerGraphs/bert24_training", load: 41.7458, has_cpu: false },
    Optimum { instance: "LayerGraphs/resnet50_inference", load: 33.7747, has_cpu: true },
    Optimum { instance: "LayerGraphs/resnet50_training", load: 78.6318, has_cpu: true },
    Optimum { instance: "OperatorGraphs/bert_l-3_inference", load: 27.9186, has_cpu: false },
    Optimum { instance: "OperatorGraphs/bert_l-3_training", load: 65.3031, has_cpu: false },
    Optimum { instance: "OperatorGraphs/bert_l-6_inference", load: 29.5795, has_cpu: true },
    Optimum { instance: "OperatorGraphs/resnet50_inference", load: 124.349, has_cpu: true },
];

/// The best non-contiguous placement that their search found.
pub const ANYWHERE: (&str, f64) = ("LayerGraphs/bert24_training", 39.944);
