//! The tensors that cross the cuts between the elements of a chain.

use crate::profile::cost_graph::CostGraph;

/// The tensors that cross a cut between elements.
#[derive(Default)]
pub struct Crossing {
    /// Bytes by the first element behind the cut that reads them, and by the element that makes them; ascending, summed up
    /// from there to the cut.
    read: Vec<(usize, f64)>,
    made: Vec<(usize, f64)>,
    /// The first element that makes any of them.
    pub since: usize,
}

impl Crossing {
    fn of(mut tensors: Vec<(usize, usize, f64)>) -> Crossing {
        let summed = |tensors: &mut dyn Iterator<Item = (usize, f64)>| {
            let mut sums: Vec<(usize, f64)> = Vec::new();
            for (at, bytes) in tensors {
                let before = sums.last().map_or(0.0, |(_, sum)| *sum);
                match sums.last_mut() {
                    Some(last) if last.0 == at => last.1 += bytes,
                    _ => sums.push((at, before + bytes)),
                }
            }
            sums
        };
        tensors.sort_by_key(|(_, reader, _)| *reader);
        let read = summed(&mut tensors.iter().map(|(_, reader, bytes)| (*reader, *bytes)));
        tensors.sort_by_key(|(maker, ..)| usize::MAX - maker);
        let mut made = summed(&mut tensors.iter().map(|(maker, _, bytes)| (*maker, *bytes)));
        made.reverse();
        let since = made.first().map_or(0, |(maker, _)| *maker);
        Crossing { read, made, since }
    }

    /// Bytes that elements before this one read.
    pub fn read_before(&self, element: usize) -> f64 {
        let count = self.read.partition_point(|(reader, _)| *reader < element);
        count.checked_sub(1).map_or(0.0, |last| self.read[last].1)
    }

    /// Bytes that this element and later ones make.
    pub fn made_from(&self, element: usize) -> f64 {
        self.made.get(self.made.partition_point(|(maker, _)| *maker < element)).map_or(0.0, |(_, sum)| *sum)
    }
}

/// What crosses the cut before each element, and after the last.
pub fn crossings(graph: &CostGraph, element_of: &[usize], elements: usize) -> Vec<Crossing> {
    let mut crossing: Vec<Vec<(usize, usize, f64)>> = vec![Vec::new(); elements + 1];
    for tensor in graph.tensors.iter().filter(|tensor| element_of[tensor.producer.index()] != usize::MAX) {
        let maker = element_of[tensor.producer.index()];
        let mut readers: Vec<usize> = tensor.consumers.iter().map(|op| element_of[op.index()]).collect();
        readers.retain(|reader| *reader != usize::MAX && *reader > maker);
        readers.sort_unstable();
        let mut cut = maker + 1;
        for reader in readers {
            (cut..=reader).for_each(|cut| crossing[cut].push((maker, reader, tensor.bytes as f64)));
            cut = cut.max(reader + 1);
        }
    }
    crossing.into_iter().map(Crossing::of).collect()
}
