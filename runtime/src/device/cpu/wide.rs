//! Compiles a function for several vector widths and selects one at run time.
//!
//! `wide!` emits a function for AVX-512, for AVX2 and for the baseline target. Bodies are ordinary loops that the
//! compiler vectorises. Functions called in the loop must be `#[inline(always)]`, otherwise they are compiled for the
//! baseline. No loop fuses multiply and add by itself and every reduction fixes its lanes, so all three give equal
//! bits.
//!
//! Generic parameters are in brackets, and each must follow from the arguments: `wide! { pub fn add[T: Real](x: &[T],
//! y: &mut [T]) { .. } }`.

macro_rules! wide {
    ($(#[$doc:meta])* $vis:vis fn $name:ident[$($generics:tt)*]($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($generics)*>($($arg: $ty),*) $(-> $out)? {
            #[inline(always)]
            fn plain<$($generics)*>($($arg: $ty),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
                fn avx512<$($generics)*>($($arg: $ty),*) $(-> $out)? {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2<$($generics)*>($($arg: $ty),*) $(-> $out)? {
                    plain($($arg),*)
                }
                let has_512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw");
                if has_512 {
                    // SAFETY: the processor has these features.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has this feature.
                    return unsafe { avx2($($arg),*) };
                }
            }
            plain($($arg),*)
        }
    };
}

pub(super) use wide;
