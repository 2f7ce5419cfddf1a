//! What others have published, or what their released programs compute on their own published inputs.

use compiler::cluster::Cluster;
use compiler::cluster::read::levels;

/// One question with a known answer.
pub struct Golden {
    /// The profile's file name before `.graph.txt`.
    pub profile: &'static str,
    /// Levels, innermost first.
    pub levels: &'static str,
    /// Milliseconds for one minibatch.
    pub minibatch_ms: f64,
}

impl Golden {
    /// The devices.
    pub fn cluster(&self) -> Cluster {
        levels(self.levels).expect("the levels of this table can be read")
    }
}

/// Objectives of PipeDream's released optimizer on its own profiles, activation compression 1: Narayanan et al., "PipeDream:
/// Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1; the profiles and the optimizer are those of
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

/// The same optimizer where its outer stages must take whole servers, and a plan that spans two of them need not.
pub const WHOLE_SERVERS: [Golden; 2] = [
    Golden { profile: "vgg16", levels: "8:40GB/s,2:3.125GB/s", minibatch_ms: 65.767 },
    Golden { profile: "alexnet", levels: "8:40GB/s,2:3.125GB/s", minibatch_ms: 9.65 },
];

/// Optimal maximum loads of contiguous placements, in the unit of the files: Tarnawski, Phanishayee, Devanur, Mahajan, Paravecino,
/// "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, section 6 and its appendix, throughput
/// maximisation; instances of msr-fiddle/dnn-partitioning. The optima may use a CPU beside the accelerators; ours may not.
pub const PLACEMENTS: [(&str, f64); 8] = [
    ("LayerGraphs/bert24_inference", 17.7899),
    ("LayerGraphs/bert24_training", 41.7458),
    ("LayerGraphs/resnet50_inference", 33.7747),
    ("LayerGraphs/resnet50_training", 78.6318),
    ("OperatorGraphs/bert_l-3_inference", 27.9186),
    ("OperatorGraphs/bert_l-3_training", 65.3031),
    ("OperatorGraphs/bert_l-6_inference", 29.5795),
    ("OperatorGraphs/resnet50_inference", 124.349),
];

/// The best that their search over non-contiguous placements found.
pub const ANYWHERE: (&str, f64) = ("LayerGraphs/bert24_training", 39.944);
