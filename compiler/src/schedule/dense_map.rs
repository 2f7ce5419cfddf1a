//! A map for mostly dense and short-lived integer keys: tokens, items, slots.
//!
//! Values are in a window that starts at the lowest key and grows with the highest, so a lookup is an index. Keys
//! outside the window are hashed, so an adversarial key costs only its own entry.

use std::collections::{HashMap, VecDeque};

pub struct DenseMap<T> {
    /// Key of the first window slot.
    base: u32,
    window: VecDeque<Option<T>>,
    limit: usize,
    beyond: HashMap<u32, T>,
    len: usize,
}

impl<T> DenseMap<T> {
    /// An empty map. The window has at most `limit` slots; use the length of an existing list.
    pub fn new(limit: usize) -> Self {
        Self { base: 0, window: VecDeque::new(), limit, beyond: HashMap::new(), len: 0 }
    }

    pub fn get(&self, number: u32) -> Option<&T> {
        match self.place(number).and_then(|place| self.window.get(place)) {
            Some(Some(held)) => Some(held),
            _ if self.beyond.is_empty() => None,
            _ => self.beyond.get(&number),
        }
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let place = self.place(number);
        match place.and_then(|place| self.window.get_mut(place)) {
            Some(Some(held)) => Some(held),
            _ => self.beyond.get_mut(&number),
        }
    }

    pub fn insert(&mut self, number: u32, held: T) -> Option<T> {
        let before = match self.place(number) {
            Some(place) if place < self.limit && !self.beyond.contains_key(&number) => {
                if place >= self.window.len() {
                    self.window.resize_with(place + 1, || None);
                }
                self.window[place].replace(held)
            }
            _ => self.beyond.insert(number, held),
        };
        self.len += usize::from(before.is_none());
        before
    }

    /// The value of the key, inserted as the default if absent.
    pub fn entry(&mut self, number: u32) -> &mut T
    where
        T: Default,
    {
        if self.get(number).is_none() {
            self.insert(number, T::default());
        }
        self.get_mut(number).expect("it existed or was just inserted")
    }

    pub fn remove(&mut self, number: u32) -> Option<T> {
        let place = self.place(number);
        let held = match place.and_then(|place| self.window.get_mut(place)).and_then(Option::take) {
            Some(held) => {
                while let Some(None) = self.window.front() {
                    self.window.pop_front();
                    // No key is above `u32::MAX`, so a window that passes it is empty.
                    self.base = self.base.saturating_add(1);
                }
                Some(held)
            }
            None => self.beyond.remove(&number),
        };
        self.len -= usize::from(held.is_some());
        held
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn place(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.base).map(|place| place as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn holds_what_a_tree_holds() {
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % below) as u32
        };
        for limit in [0, 3, 50] {
            let (mut numbered, mut tree, mut low) = (DenseMap::new(limit), BTreeMap::new(), 0u32);
            for step in 0..5000u32 {
                low += random(2);
                let number = if random(20) == 0 { u32::MAX - random(3) } else { low.saturating_sub(random(20)) };
                match random(4) {
                    0 => assert_eq!(numbered.remove(number), tree.remove(&number)),
                    1 => assert_eq!(*numbered.entry(number), *tree.entry(number).or_default()),
                    2 => assert_eq!(numbered.get_mut(number), tree.get_mut(&number)),
                    _ => assert_eq!(numbered.insert(number, step), tree.insert(number, step)),
                }
                assert_eq!(numbered.get(number), tree.get(&number));
                assert_eq!((numbered.len(), numbered.is_empty()), (tree.len(), tree.is_empty()));
            }
            tree.iter().for_each(|(number, held)| assert_eq!(numbered.get(*number), Some(held)));
        }
    }
}
