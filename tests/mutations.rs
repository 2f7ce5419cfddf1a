//! A thousand damaged models through import and planning: no panic, bounded memory, bounded time.
//!
//! The fuzz targets in `tests/fuzz` use the same edits. A counting allocator bounds the live bytes of each case.
//! `PIPEC_MUTATIONS` sets the number of cases of each kind, `PIPEC_SEED` the first seed.

#[path = "fuzz/src/damage.rs"]
mod damage;
#[path = "fuzz/src/meet.rs"]
mod meet;

use damage::{Random, damage, setting};
use meet::FuzzStage;
use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Maximum live bytes. The seeds have some hundred kilobytes; constants fold to at most a megabyte each.
const MOST_BYTES: usize = 512 << 20;

/// Maximum seconds per case, to detect non-termination on any machine.
const MOST_SECONDS: f64 = 30.0;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; counting only uses atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's guarantees are those of the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's guarantees are those of the system allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs a case and checks its resources; a panic states how to repeat it.
fn case(kind: &str, seed: u64, input: &[u8], run: fn(&[u8]) -> FuzzStage) -> FuzzStage {
    let (before, started) = (LIVE.load(Relaxed), Instant::now());
    PEAK.store(before, Relaxed);
    let reached = catch_unwind(|| run(input));
    let (took, held) = (started.elapsed().as_secs_f64(), PEAK.load(Relaxed).saturating_sub(before));
    let Ok(reached) = reached else { panic!("{kind} panics: PIPEC_SEED={seed} PIPEC_MUTATIONS=1") };
    assert!(held <= MOST_BYTES, "{kind} holds {held} bytes: PIPEC_SEED={seed} PIPEC_MUTATIONS=1");
    assert!(took <= MOST_SECONDS, "{kind} takes {took} s: PIPEC_SEED={seed} PIPEC_MUTATIONS=1");
    reached
}

// A single test, because allocations are counted per process.
#[test]
fn damaged_models_are_refused_or_planned() {
    let (count, start) = (setting("PIPEC_MUTATIONS", 400), setting("PIPEC_SEED", 1));
    let seeds = meet::seeds();
    for (format, bytes) in &seeds {
        let run = if *format == "onnx" { meet::onnx_bytes } else { meet::pt2_zip };
        assert_eq!(run(bytes), FuzzStage::Planned, "an undamaged seed is planned");
    }
    let mut reached = [[0u64; 3]; 4];
    for seed in start..start + count {
        let mut random = Random::new(seed);
        let (format, bytes) = &seeds[random.below(seeds.len())];
        let mut bytes = bytes.clone();
        damage(&mut bytes, &mut random);
        let (at, run): (usize, fn(&[u8]) -> FuzzStage) =
            if *format == "onnx" { (0, meet::onnx_bytes) } else { (1, meet::pt2_zip) };
        reached[at][case(format, seed, &bytes, run) as usize] += 1;
        let decisions: Vec<u8> = (0..8 + random.below(120)).map(|_| random.next() as u8).collect();
        reached[2][case("onnx graph", seed, &decisions, meet::onnx_graph) as usize] += 1;
        reached[3][case("pt2 json", seed, &decisions, meet::pt2_json) as usize] += 1;
    }
    println!(
        "refused, imported, planned: onnx bytes {:?}, pt2 bytes {:?}, onnx graphs {:?}, pt2 JSON {:?}",
        reached[0], reached[1], reached[2], reached[3]
    );
    // Edits that never or always succeed would test nothing.
    for edits in &reached[2..] {
        assert!(count < 100 || (edits[0] > 0 && edits[2] > 0), "{reached:?}");
    }
}
