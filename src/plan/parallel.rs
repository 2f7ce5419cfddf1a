//! Independent computations on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The results of `work` on all items, in their order.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    if threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let run = || {
        while let Some((item, done)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).zip(done.get(at))
        } {
            let result = work(item);
            *done.lock().expect("no other thread has this item") = Some(result);
        }
    };
    thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(run)));
        run();
    });
    let result = |done: Mutex<Option<R>>| done.into_inner().expect("no thread panicked").expect("all items are done");
    done.into_iter().map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order() {
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(in_parallel(&items, |item| item * item), items.iter().map(|item| item * item).collect::<Vec<_>>());
        assert!(in_parallel(&[] as &[u64], |item| *item).is_empty());
    }
}
