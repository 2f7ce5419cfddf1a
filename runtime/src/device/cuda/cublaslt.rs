//! The functions of libcublasLt that pipec calls, from the library that was found. cudarc would open it by name, and so
//! perhaps another one.
//!
//! Numbers are those of `cublasLt.h`, `cublas_api.h` and `library_types.h`, which are the same in CUDA 11 to 13.

use super::library::functions;
use super::queue::Queue;
use compiler::tensor::DType;
use std::ffi::{c_float, c_int, c_void};
use std::ptr;
use thiserror::Error;

/// A status of libcublasLt, `cublasStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("cuBLASLt error {0}")]
pub struct CublasError(pub c_int);

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: CublasError = CublasError(15);

/// `CUBLASLT_MATMUL_DESC_TRANSA` and `CUBLASLT_MATMUL_DESC_TRANSB`.
const TRANSPOSES: [c_int; 2] = [3, 4];

/// `CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT`.
const BATCH_COUNT: c_int = 5;

/// `CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET`.
const BATCH_STRIDE: c_int = 6;

/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const MAX_WORKSPACE: c_int = 1;

/// `CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK`.
const REDUCTION_SCHEMES: c_int = 3;

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: parts of a sum are kept in the compute type and added in order. A sum may
/// also have one part.
const IN_COMPUTE_TYPE: u32 = 2;

/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`, and those of B, C and D.
const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// An object of the library.
type Handle = *mut c_void;

/// An algorithm with its parameters, `cublasLtMatmulAlgo_t`: plain data, valid for equal GPUs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Default)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: c_float,
    reserved: [c_int; 4],
}

type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;

functions! {
    CublasLt:
    create = c"cublasLtCreate": unsafe extern "C" fn(*mut Handle) -> c_int;
    destroy = c"cublasLtDestroy": Destroy;
    product_create = c"cublasLtMatmulDescCreate": unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int;
    product_set = c"cublasLtMatmulDescSetAttribute": SetAttribute;
    product_destroy = c"cublasLtMatmulDescDestroy": Destroy;
    layout_create = c"cublasLtMatrixLayoutCreate": unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int;
    layout_set = c"cublasLtMatrixLayoutSetAttribute": SetAttribute;
    layout_destroy = c"cublasLtMatrixLayoutDestroy": Destroy;
    preference_create = c"cublasLtMatmulPreferenceCreate": unsafe extern "C" fn(*mut Handle) -> c_int;
    preference_set = c"cublasLtMatmulPreferenceSetAttribute": SetAttribute;
    preference_destroy = c"cublasLtMatmulPreferenceDestroy": Destroy;
    heuristic = c"cublasLtMatmulAlgoGetHeuristic": unsafe extern "C" fn(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut HeuristicResult, *mut c_int
    ) -> c_int;
    matmul = c"cublasLtMatmul": unsafe extern "C" fn(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
        Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, *mut c_void
    ) -> c_int;
}

fn check_status(status: c_int) -> Result<(), CublasError> {
    if status == 0 { Ok(()) } else { Err(CublasError(status)) }
}

/// An object of the library, destroyed when it is dropped.
struct Object {
    raw: Handle,
    destroy: Destroy,
}

// SAFETY: the library allows any thread to use its objects; descriptors do not change after they are made.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    fn new(destroy: Destroy, create: impl FnOnce(*mut Handle) -> c_int) -> Result<Object, CublasError> {
        let mut raw = ptr::null_mut();
        check_status(create(&mut raw))?;
        Ok(Object { raw, destroy })
    }

    fn set<T: Copy>(&self, set: SetAttribute, attribute: c_int, value: T) -> Result<(), CublasError> {
        // SAFETY: the object is live, and the library reads a value of this size.
        check_status(unsafe { set(self.raw, attribute, (&raw const value).cast(), size_of::<T>()) })
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed only here.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// The types of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductType {
    /// Element type of `a` and `b`.
    pub dtype: DType,
    /// Element type of `c`, which may be f32 for 16-bit inputs.
    pub result: DType,
    /// Whether inputs of f32 may be rounded to TF32.
    pub tf32: bool,
}

/// A stored matrix, or a batch of them. Matrices are column-major, so a row-major one is given by its transpose.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Rows and columns; the rows are contiguous.
    pub size: [usize; 2],
    /// Elements from one column to the next.
    pub line: usize,
    /// Matrices of the batch.
    pub batch: usize,
    /// Elements from one to the next; 0 if all are the same.
    pub stride: usize,
    /// Bytes of which every address of the first matrix is a multiple.
    pub alignment: u32,
}

/// The library on a GPU, kept open.
pub struct CublasLt {
    functions: &'static Functions,
    handle: Object,
}

/// A described product `c = a b + β c`.
pub struct Described {
    functions: &'static Functions,
    product: Object,
    /// Of a, b and c.
    layouts: [Object; 3],
    algorithm: Algorithm,
    pub workspace: usize,
    is_double: bool,
}

impl CublasLt {
    /// Opens the library on the GPU whose context the calling thread has bound. `None` if it is not there or does not
    /// start.
    pub fn open() -> Option<CublasLt> {
        let functions = Functions::find()?;
        // SAFETY: the library writes one handle.
        let handle = Object::new(functions.destroy, |to| unsafe { (functions.create)(to) }).ok()?;
        Some(CublasLt { functions, handle })
    }

    /// Describes the product of matrices of this type, of which the first two may be transposed. Without an
    /// `algorithm` the library chooses one with at most `workspace` bytes. The calling thread has bound the context.
    pub fn describe(
        &self,
        types: ProductType,
        transposes: [bool; 2],
        matrices: &[Stored; 3],
        algorithm: Option<(Algorithm, usize)>,
        workspace: usize,
    ) -> Result<Described, CublasError> {
        let f = self.functions;
        // CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32, or CUBLAS_COMPUTE_32F, which keeps the precision of f32
        // inputs; and the type of β.
        let (compute, scale) = match types {
            ProductType { dtype: DType::F64, .. } => (70, 1),
            ProductType { dtype: DType::F32, tf32: true, .. } => (77, 0),
            _ => (68, 0),
        };
        let type_number = |dtype: DType| match dtype {
            DType::F32 => Ok(0),
            DType::F64 => Ok(1),
            DType::F16 => Ok(2),
            DType::Bf16 => Ok(14),
            _ => Err(NOT_SUPPORTED),
        };
        // SAFETY: the library writes one handle in this and the next calls.
        let product = Object::new(f.product_destroy, |to| unsafe { (f.product_create)(to, compute, scale) })?;
        for (attribute, is_transposed) in TRANSPOSES.into_iter().zip(transposes) {
            product.set(f.product_set, attribute, c_int::from(is_transposed))?;
        }
        let layout = |matrix: &Stored, dtype: DType| {
            let [rows, columns] = matrix.size;
            let number = |size: usize| i64::try_from(size).map_err(|_| NOT_SUPPORTED);
            let (leading, dtype_number) = (number(matrix.line)?, type_number(dtype)?);
            // SAFETY: as above.
            let layout = Object::new(f.layout_destroy, |to| unsafe {
                (f.layout_create)(to, dtype_number, rows as u64, columns as u64, leading)
            })?;
            layout.set(f.layout_set, BATCH_COUNT, c_int::try_from(matrix.batch).map_err(|_| NOT_SUPPORTED)?)?;
            layout.set(f.layout_set, BATCH_STRIDE, number(matrix.stride)?)?;
            Ok(layout)
        };
        let [a, b, c] = matrices;
        let layouts = [layout(a, types.dtype)?, layout(b, types.dtype)?, layout(c, types.result)?];
        let is_double = types.dtype == DType::F64;
        let mut description =
            Described { functions: f, product, layouts, algorithm: Algorithm::default(), workspace: 0, is_double };
        let alignments = [a.alignment, b.alignment, c.alignment, c.alignment];
        (description.algorithm, description.workspace) = match algorithm {
            Some(algorithm) => algorithm,
            None => self.choose(&description, alignments, workspace)?,
        };
        Ok(description)
    }

    /// The first algorithm that the library suggests.
    fn choose(
        &self,
        description: &Described,
        alignments: [u32; 4],
        workspace: usize,
    ) -> Result<(Algorithm, usize), CublasError> {
        let f = self.functions;
        // SAFETY: the library writes one handle.
        let preference = Object::new(f.preference_destroy, |to| unsafe { (f.preference_create)(to) })?;
        preference.set(f.preference_set, MAX_WORKSPACE, workspace as u64)?;
        preference.set(f.preference_set, REDUCTION_SCHEMES, IN_COMPUTE_TYPE)?;
        for (attribute, alignment) in ALIGNMENTS.into_iter().zip(alignments) {
            preference.set(f.preference_set, attribute, alignment)?;
        }
        let (mut result, mut count) = (HeuristicResult::default(), 0);
        let [a, b, c] = &description.layouts;
        // SAFETY: all objects are live, and the library writes at most one result and the number of results.
        check_status(unsafe {
            (f.heuristic)(
                self.handle.raw,
                description.product.raw,
                a.raw,
                b.raw,
                c.raw,
                c.raw,
                preference.raw,
                1,
                &mut result,
                &mut count,
            )
        })?;
        if count < 1 || result.workspace > workspace {
            return Err(NOT_SUPPORTED);
        }
        check_status(result.state)?;
        Ok((result.algorithm, result.workspace))
    }

    /// Queues the product of matrices at these addresses, added to `c` or not.
    ///
    /// # Safety
    ///
    /// The calling thread has bound the context of the handle and of the stream. The memory at the addresses is as
    /// described and aligned, that of the workspace to 256 bytes.
    pub unsafe fn multiply(
        &self,
        description: &Described,
        [a, b, c]: [u64; 3],
        adds: bool,
        workspace: u64,
        queue: &Queue,
    ) -> Result<(), CublasError> {
        // One and β, in the scale type.
        let (single, double) = ([1f32, f32::from(u8::from(adds))], [1f64, f64::from(u8::from(adds))]);
        let scales: [*const c_void; 2] = match description.is_double {
            true => [(&raw const double[0]).cast(), (&raw const double[1]).cast()],
            false => [(&raw const single[0]).cast(), (&raw const single[1]).cast()],
        };
        let pointer = |address: u64| address as usize as *mut c_void;
        let [a_layout, b_layout, c_layout] = &description.layouts;
        // SAFETY: see above. The library reads the scales, on the host, before it returns.
        check_status(unsafe {
            (description.functions.matmul)(
                self.handle.raw,
                description.product.raw,
                scales[0],
                pointer(a),
                a_layout.raw,
                pointer(b),
                b_layout.raw,
                scales[1],
                pointer(c),
                c_layout.raw,
                pointer(c),
                c_layout.raw,
                &description.algorithm,
                pointer(workspace),
                description.workspace,
                queue.raw().cast(),
            )
        })
    }
}

impl Described {
    /// The algorithm and its workspace, for the same product on an equal GPU.
    pub fn algorithm(&self) -> (Algorithm, usize) {
        (self.algorithm, self.workspace)
    }
}
