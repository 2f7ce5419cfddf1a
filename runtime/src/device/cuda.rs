//! NVIDIA GPUs: every core op as CUDA C++ kernels specialised to its shapes.
//!
//! A [`LaunchPlan`](launch_plan::LaunchPlan) is an op at concrete shapes: ordered launches, each with kernel source,
//! geometry and argument locations. Sizes are literals in the source, so a kernel only takes addresses and the compiler
//! sees every bound. The source needs no headers: NVRTC compiles it also on machines without a GPU.
//!
//! Results depend only on shapes and inputs. There are no atomic additions: a block reduces as a tree, blocks are added
//! in order, and scattered slices with equal targets are added in index order.

pub mod attention;
pub mod batch_norm;
pub mod chain;
pub mod compile;
pub mod conv;
pub mod cross_entropy;
pub mod cublaslt;
pub mod cudnn;
pub mod cudnn_descriptor;
pub mod device;
pub mod download;
pub mod draft;
pub mod element;
pub mod elementwise;
pub mod event;
pub mod gather;
pub mod gpu;
pub mod grouped_matmul;
pub mod gru;
pub mod launch_plan;
pub mod layer_norm;
pub mod library;
pub mod library_convolution;
pub mod library_kernel;
pub mod library_product;
pub mod lstm;
pub mod many;
pub mod matmul;
pub mod movement;
pub mod nccl;
pub mod nvrtc;
pub mod offsets;
pub mod optimizer;
pub mod ordering;
pub mod padded_product;
pub mod per_gpu;
pub mod pool;
pub mod prelude;
pub mod queue;
pub mod reduce;
pub mod rnn;
pub mod rows;
pub mod search_path;
pub mod softmax;
pub mod staging;
pub mod stream;
pub mod table;
mod tail;
pub mod verbs;
pub mod windows;
