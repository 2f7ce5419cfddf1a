//! `TfIdfVectorizer` on integers: counts n-grams in sequences. The input must be constant, since text is not an input
//! of a network.

use super::{Known, LowerReason, Outputs, Scope};
use crate::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// Maximum number of n-gram elements examined.
const MOST: usize = 1 << 26;

const LARGEST: usize = 1 << 22;

/// N-gram counts, `[columns]` or `[rows, columns]`.
pub fn tf_idf(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.tensor(0, "the input of TfIdfVectorizer")?.ok_or(LowerReason::Missing { slot: 0 })?;
    let (rows, length, batched) = match x.shape() {
        [] => (1, 1, false),
        &[length] => (1, length, false),
        &[rows, length] => (rows, length, true),
        shape => return Err(LowerReason::Inputs(format!("sequences of shape {shape:?}"))),
    };
    if scope.is_set("pool_strings") {
        return Err(LowerReason::Unsupported("a list of n-grams of strings".to_string()));
    }
    let (columns, grams) = pool(scope)?;
    let (shortest, longest) = lengths(scope)?;
    let skips = usize::try_from(scope.int("max_skip_count", 0)?).unwrap_or(0);
    let steps = skips.saturating_add(1).min(length.max(1));
    let steps_bound =
        [rows, length, steps, longest - shortest + 1, longest].into_iter().try_fold(1usize, usize::checked_mul);
    if steps_bound.is_none_or(|steps_bound| steps_bound > MOST)
        || rows.checked_mul(columns).is_none_or(|count| count > LARGEST)
    {
        return Err(LowerReason::Unsupported(format!(
            "n-grams of up to {longest} of {length} numbers, skipping {skips}"
        )));
    }
    let values = x.to_i64();
    let mut counts = vec![0.0; rows * columns];
    for (row, sequence) in values.chunks(length.max(1)).enumerate() {
        for size in shortest..=longest {
            // Unigrams have no skips.
            for step in 1..=if size == 1 { 1 } else { steps } {
                for start in 0..sequence.len().saturating_sub((size - 1) * step) {
                    let gram: Vec<i64> = (0..size).map(|n| sequence[start + n * step]).collect();
                    if let Some(column) = grams.get(&gram) {
                        counts[row * columns + column.0] += 1.0;
                    }
                }
            }
        }
    }
    weigh(scope, &mut counts, columns, &grams)?;
    let shape = if batched { vec![rows, columns] } else { vec![columns] };
    Ok(vec![Known::Tensor(Tensor::from_f64(&shape, &counts).cast(DType::F32))])
}

/// N-grams to count, each with its output column and its index in the pool.
type Grams = BTreeMap<Vec<i64>, (usize, usize)>;

/// Parses the n-gram pool: all unigrams, then all bigrams and so on, starting at the offsets in `ngram_counts`.
fn pool(scope: &Scope<'_>) -> Result<(usize, Grams), LowerReason> {
    let list = |name| Ok::<_, LowerReason>(scope.ints(name)?.unwrap_or_default());
    let (pool, starts, columns_of) = (list("pool_int64s")?, list("ngram_counts")?, list("ngram_indexes")?);
    let invalid = |what: &str| LowerReason::Inputs(format!("the list of n-grams is not valid: {what}"));
    let columns =
        columns_of.iter().map(|&p| usize::try_from(p).ok().filter(|p| *p < LARGEST)).collect::<Option<Vec<usize>>>();
    let columns = columns.ok_or_else(|| invalid("a column is negative or too large"))?;
    let mut starts: Vec<usize> = starts.iter().map(|&s| usize::try_from(s).unwrap_or(usize::MAX)).collect();
    starts.push(pool.len());
    let mut grams = Grams::new();
    let mut at = 0;
    for (n, bounds) in starts.windows(2).enumerate() {
        let part = pool.get(bounds[0]..bounds[1]).ok_or_else(|| invalid("the start of a size"))?;
        for gram in part.chunks_exact(n + 1) {
            let column = *columns.get(at).ok_or_else(|| invalid("there are fewer columns than n-grams"))?;
            grams.insert(gram.to_vec(), (column, at));
            at += 1;
        }
    }
    Ok((columns.iter().max().map_or(0, |most| most + 1), grams))
}

fn lengths(scope: &Scope<'_>) -> Result<(usize, usize), LowerReason> {
    let (shortest, longest) = (scope.int("min_gram_length", 1)?, scope.int("max_gram_length", 1)?);
    match (usize::try_from(shortest), usize::try_from(longest)) {
        (Ok(short), Ok(long)) if 1 <= short && short <= long && long <= 1024 => Ok((short, long)),
        _ => Err(LowerReason::Inputs(format!("n-grams of {shortest} to {longest} numbers"))),
    }
}

/// Applies the mode: TF keeps the counts, IDF gives the weight or 0, TFIDF multiplies by the weight.
fn weigh(scope: &Scope<'_>, counts: &mut [f64], columns: usize, grams: &Grams) -> Result<(), LowerReason> {
    let mut weights = vec![1.0; columns];
    if let Some(factors) = scope.floats("weights")? {
        for &(column, at) in grams.values() {
            weights[column] =
                f64::from(*factors.get(at).ok_or_else(|| LowerReason::Inputs("fewer weights than n-grams".into()))?);
        }
    }
    let mode = scope.text("mode", "TF")?;
    for (at, count) in counts.iter_mut().enumerate() {
        let weight = weights[at % columns];
        *count = match mode.as_str() {
            "TF" => *count,
            "IDF" if *count > 0.0 => weight,
            "IDF" => 0.0,
            "TFIDF" => *count * weight,
            other => return Err(LowerReason::Unsupported(format!("the weighting `{other}`"))),
        };
    }
    Ok(())
}
