//! Compiles a function for the vectors of this machine.
//!
//! `wide!` writes a function three times, for AVX-512, for AVX2 and for the plain target, and asks the processor at run
//! time which one to call. The bodies are ordinary loops that the compiler vectorises. What they call in the loop must be
//! `#[inline(always)]`, else it is compiled for the plain target. No loop fuses a multiplication with an addition
//! on its own and every reduction fixes its lanes, so all three give the same bits.
//!
//! Generic parameters stand in brackets, and each must follow from the arguments:
//! `wide! { pub fn add[T: Real](x: &[T], y: &mut [T]) { .. } }`.

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
                    // SAFETY: the processor has just been asked for these features.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has just been asked for this feature.
                    return unsafe { avx2($($arg),*) };
                }
            }
            plain($($arg),*)
        }
    };
}

pub(super) use wide;
