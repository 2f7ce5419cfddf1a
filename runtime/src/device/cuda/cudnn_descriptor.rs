//! The functions of libcudnn that pipec calls, from the library that was found, and the descriptors of its graph API.
//!
//! Numbers are those of `cudnn_graph.h`, which are the same in all versions 9.

use super::library::functions;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use thiserror::Error;

/// Why libcudnn does not do something.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudnnError {
    /// A status of the library, `cudnnStatus_t`, and its message.
    #[error("cuDNN error {status}: {message}")]
    Status { status: c_int, message: String },
    #[error("cuDNN has no engine for it")]
    NoEngine,
}

/// Bytes of the longest message that is kept.
const MOST_MESSAGE: usize = 512;

/// The first version whose numbers are known.
const OLDEST: usize = 90_000;

/// An object of the library.
pub(super) type Raw = *mut c_void;

/// A type of attribute values: its number in `cudnnBackendAttributeType_t`.
pub(super) trait Value: Copy {
    const TYPE: c_int;
}

impl Value for i64 {
    const TYPE: c_int = 3;
}

impl Value for f32 {
    const TYPE: c_int = 4;
}

impl Value for f64 {
    const TYPE: c_int = 5;
}

/// Characters of JSON.
impl Value for c_char {
    const TYPE: c_int = 24;
}

/// Declares a value that is stored like another type.
macro_rules! value {
    ($(#[$about:meta])* $name:ident($stored:ty) = $number:literal) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) $stored);

        impl Value for $name {
            const TYPE: c_int = $number;
        }
    };
}

value!(Context(Raw) = 0);
value!(DataType(c_int) = 1);
value!(
    /// An address on a GPU.
    Address(u64) = 6
);
value!(ConvolutionMode(c_int) = 7);
value!(HeuristicMode(c_int) = 8);
value!(
    /// What an engine does to the numbers, `cudnnBackendNumericalNote_t`.
    Note(c_int) = 11
);
value!(DescriptorValue(Raw) = 15);

/// Kinds of descriptors.
pub(super) mod kind {
    pub const CONVOLUTION: i32 = 1;
    pub const ENGINE: i32 = 2;
    pub const CONFIGURATION: i32 = 3;
    pub const HEURISTIC: i32 = 4;
    pub const PLAN: i32 = 5;
    pub const GRAPH: i32 = 15;
    pub const VARIANT_PACK: i32 = 16;
    pub const TENSOR: i32 = 17;
    pub const GPU_PROPERTIES: i32 = 38;
}

/// Attributes, each of the kind of descriptor in its name.
pub(super) mod attribute {
    pub const CONVOLUTION_COMPUTE_TYPE: i32 = 100;
    pub const CONVOLUTION_MODE: i32 = 101;
    pub const CONVOLUTION_DILATIONS: i32 = 102;
    pub const CONVOLUTION_STRIDES: i32 = 103;
    pub const CONVOLUTION_PADS_END: i32 = 104;
    pub const CONVOLUTION_PADS_BEGIN: i32 = 105;
    pub const CONVOLUTION_SPATIAL_DIMS: i32 = 106;
    pub const HEURISTIC_MODE: i32 = 200;
    pub const HEURISTIC_GRAPH: i32 = 201;
    pub const HEURISTIC_RESULTS: i32 = 202;
    pub const HEURISTIC_GPU_PROPERTIES: i32 = 204;
    pub const CONFIGURATION_ENGINE: i32 = 300;
    pub const PLAN_CONTEXT: i32 = 400;
    pub const PLAN_CONFIGURATION: i32 = 401;
    pub const PLAN_WORKSPACE: i32 = 402;
    pub const PLAN_GPU_PROPERTIES: i32 = 407;
    pub const GRAPH_CONTEXT: i32 = 800;
    pub const GRAPH_OPERATIONS: i32 = 801;
    pub const TENSOR_ALIGNMENT: i32 = 900;
    pub const TENSOR_DATA_TYPE: i32 = 901;
    pub const TENSOR_SIZES: i32 = 902;
    pub const TENSOR_STRIDES: i32 = 903;
    pub const TENSOR_ID: i32 = 906;
    pub const VARIANT_PACK_IDS: i32 = 1000;
    pub const VARIANT_PACK_ADDRESSES: i32 = 1001;
    pub const VARIANT_PACK_WORKSPACE: i32 = 1003;
    pub const ENGINE_NOTES: i32 = 1303;
    pub const GPU_PROPERTIES_JSON: i32 = 2702;
}

functions! {
    Cudnn:
    version = c"cudnnGetVersion": unsafe extern "C" fn() -> usize;
    pub create = c"cudnnCreate": unsafe extern "C" fn(*mut Raw) -> c_int;
    pub destroy = c"cudnnDestroy": unsafe extern "C" fn(Raw) -> c_int;
    pub set_stream = c"cudnnSetStream": unsafe extern "C" fn(Raw, *mut c_void) -> c_int;
    descriptor_create = c"cudnnBackendCreateDescriptor": unsafe extern "C" fn(c_int, *mut Raw) -> c_int;
    descriptor_destroy = c"cudnnBackendDestroyDescriptor": unsafe extern "C" fn(Raw) -> c_int;
    descriptor_finalize = c"cudnnBackendFinalize": unsafe extern "C" fn(Raw) -> c_int;
    descriptor_set = c"cudnnBackendSetAttribute": unsafe extern "C" fn(
        Raw, c_int, c_int, i64, *const c_void
    ) -> c_int;
    descriptor_get = c"cudnnBackendGetAttribute": unsafe extern "C" fn(
        Raw, c_int, c_int, i64, *mut i64, *mut c_void
    ) -> c_int;
    pub execute = c"cudnnBackendExecute": unsafe extern "C" fn(Raw, Raw, Raw) -> c_int;
    last_error = c"cudnnGetLastErrorString": unsafe extern "C" fn(*mut c_char, usize);
}

impl Functions {
    /// Those of a version that is new enough.
    pub fn known() -> Option<&'static Functions> {
        // SAFETY: the function needs no device.
        Functions::find().filter(|functions| unsafe { (functions.version)() } >= OLDEST)
    }

    pub fn check_status(&self, status: c_int) -> Result<(), CudnnError> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0u8; MOST_MESSAGE];
        // SAFETY: the library writes at most as many bytes as it is told.
        unsafe { (self.last_error)(message.as_mut_ptr().cast(), MOST_MESSAGE) };
        let message = CStr::from_bytes_until_nul(&message).map_or("".into(), CStr::to_string_lossy);
        Err(CudnnError::Status { status, message: message.trim().to_string() })
    }
}

/// A descriptor of the library, destroyed when it is dropped.
pub(super) struct Descriptor {
    functions: &'static Functions,
    pub raw: Raw,
}

// SAFETY: the library allows any thread to use its descriptors.
unsafe impl Send for Descriptor {}
// SAFETY: descriptors do not change after they are finalised, and only those are shared.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub fn new(functions: &'static Functions, kind: c_int) -> Result<Descriptor, CudnnError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one descriptor.
        functions.check_status(unsafe { (functions.descriptor_create)(kind, &mut raw) })?;
        Ok(Descriptor { functions, raw })
    }

    pub fn set<T: Value>(&self, attribute: c_int, values: &[T]) -> Result<(), CudnnError> {
        let count = values.len() as i64;
        // SAFETY: the descriptor is live, and the library reads as many values of this type.
        self.functions.check_status(unsafe {
            (self.functions.descriptor_set)(self.raw, attribute, T::TYPE, count, values.as_ptr().cast())
        })
    }

    pub fn set_descriptor(&self, attribute: c_int, descriptor: &Descriptor) -> Result<(), CudnnError> {
        self.set(attribute, &[DescriptorValue(descriptor.raw)])
    }

    pub fn finalise(self) -> Result<Descriptor, CudnnError> {
        // SAFETY: the descriptor is live.
        self.functions.check_status(unsafe { (self.functions.descriptor_finalize)(self.raw) })?;
        Ok(self)
    }

    /// Reads values, and returns how many there are. Descriptors are written into those that are given.
    pub fn get<T: Value>(&self, attribute: c_int, values: &mut [T]) -> Result<usize, CudnnError> {
        let (capacity, mut count) = (values.len() as i64, 0);
        let to = if values.is_empty() { ptr::null_mut() } else { values.as_mut_ptr().cast() };
        // SAFETY: the descriptor is live, and the library writes at most as many values of this type.
        self.functions.check_status(unsafe {
            (self.functions.descriptor_get)(self.raw, attribute, T::TYPE, capacity, &mut count, to)
        })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed only here.
        unsafe { (self.functions.descriptor_destroy)(self.raw) };
    }
}
