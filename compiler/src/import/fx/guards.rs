//! Equalities between input sizes, from the guards of the program. With `Dim.AUTO` or `Dim.DYNAMIC` the exporter gives
//! every size its own symbol and states equalities only in guards.

use std::collections::HashMap;

type Size<'a> = (&'a str, usize);

/// Maps each symbol to the symbol that the guards state it equals. A guard compares sizes or products of sizes,
/// `(L['a'].size()[1]*L['a'].size()[0]) == (L['b'].size()[1]*L['b'].size()[0])`; in products, sizes of the same axis
/// are assumed equal. `symbol` returns the symbol of an input's axis.
pub fn merge_equal_symbols(
    guards: &[String],
    symbol: &dyn Fn(&str, usize) -> Option<String>,
) -> HashMap<String, String> {
    let mut aliases: HashMap<String, String> = HashMap::new();
    for guard in guards {
        let Some((left, right)) = guard.split_once(" == ") else { continue };
        let (Some(mut left), Some(mut right)) = (factors(left), factors(right)) else { continue };
        let by_axis = |size: &Size<'_>| size.1;
        left.sort_by_key(by_axis);
        right.sort_by_key(by_axis);
        let axes = |sizes: &[Size<'_>]| sizes.iter().map(by_axis).collect::<Vec<_>>();
        if left.len() > 1 && axes(&left) != axes(&right) || left.len() != right.len() {
            continue;
        }
        for (a, b) in left.into_iter().zip(right) {
            let (Some(a), Some(b)) = (symbol(a.0, a.1), symbol(b.0, b.1)) else { continue };
            let (a, b) = (resolve(&aliases, a), resolve(&aliases, b));
            if a != b {
                aliases.insert(a, b);
            }
        }
    }
    let names: Vec<String> = aliases.keys().cloned().collect();
    names.into_iter().map(|name| (name.clone(), resolve(&aliases, name))).collect()
}

fn resolve(aliases: &HashMap<String, String>, mut name: String) -> String {
    while let Some(alias) = aliases.get(&name) {
        name.clone_from(alias);
    }
    name
}

/// The sizes multiplied on one side of a guard; `None` for any other expression.
fn factors(side: &str) -> Option<Vec<Size<'_>>> {
    let side = side.trim();
    let inner = side.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(side);
    inner.split('*').map(size).collect()
}

/// Parses `L['name'].size()[axis]`.
fn size(text: &str) -> Option<Size<'_>> {
    let (name, rest) = text.trim().strip_prefix("L['")?.split_once("'].size()[")?;
    Some((name, rest.strip_suffix(']')?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_guards_compare_are_one() {
        let symbol = |input: &str, axis: usize| Some(format!("{input}{axis}"));
        let guards = [
            "L['m'].size()[1] == L['x'].size()[1]",
            "(L['m'].size()[1]*L['x'].size()[0]) == (L['y'].size()[1]*L['y'].size()[0])",
            "L['x'].size()[0] <= 8",
            "(L['x'].size()[0]*L['x'].size()[2]) == (L['y'].size()[1]*L['y'].size()[0])",
        ];
        let known = merge_equal_symbols(&guards.map(String::from), &symbol);
        let of = |name: &str| resolve(&known, name.to_string());
        assert_eq!((of("m1"), of("x0")), (of("x1"), of("y0")));
        assert_eq!(of("x1"), of("y1"));
        assert_ne!(of("x0"), of("x1"));
        assert_eq!(of("x2"), "x2");
    }
}
