//! Colours of all pictures, and the style sheet that assigns them to classes.
//!
//! The hues are those of Okabe and Ito, which are distinguishable with any common colour blindness. In the HTML page
//! they are CSS variables, to support a dark mode. In SVG files the variables are replaced by their light values, since
//! few SVG programs support variables.

/// Variable name, light value, dark value.
pub const COLOURS: [(&str, &str, &str); 21] = [
    ("page", "#ffffff", "#14171a"),
    ("card", "#f6f7f9", "#1c2024"),
    ("ink", "#1c2126", "#e6e9ec"),
    ("quiet", "#5b6570", "#9aa5b0"),
    ("line", "#d9dee3", "#343b42"),
    ("grid", "#e9ecef", "#272d33"),
    ("link", "#0b62a8", "#6cb4ee"),
    ("forward", "#0072b2", "#3a9bd9"),
    ("backward", "#e69f00", "#e8a92a"),
    ("backward-weight", "#cc79a7", "#d58fb6"),
    ("step", "#009e73", "#2bb98f"),
    ("all-reduce", "#d55e00", "#e57a2b"),
    ("activation", "#56b4e9", "#56b4e9"),
    ("gradient", "#f2c45a", "#c99a34"),
    ("wait", "#c9ced4", "#4a525a"),
    ("purple", "#cc79a7", "#d58fb6"),
    ("grey", "#8b949e", "#8b949e"),
    ("on-forward", "#ffffff", "#0b1014"),
    ("on-backward", "#2a1d00", "#1d1400"),
    ("good", "#007a59", "#3cc39c"),
    ("bad", "#b3400a", "#f08a4b"),
];

/// Style sheet of all pictures, with variables.
pub const PICTURE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;fill:var(--ink)}\
.quiet{fill:var(--quiet)}\
.small{font-size:11px}\
.strong{font-weight:600}\
.figure{font-variant-numeric:tabular-nums}\
.grid{stroke:var(--grid);stroke-width:1}\
.axis{stroke:var(--line);stroke-width:1}\
.lane{fill:var(--card)}\
.box{fill:var(--page);stroke:var(--line);stroke-width:1}\
.behind{fill:var(--card);stroke:var(--line);stroke-width:1}\
.arrow{fill:none;stroke:var(--quiet);stroke-width:1.4}\
.head{fill:var(--quiet)}\
.over{fill:transparent}\
.track{fill:var(--grid)}\
.limit{stroke:var(--bad);stroke-width:1.4;stroke-dasharray:5 3}\
.limit-text{fill:var(--bad)}\
.phase{fill:var(--grid)}\
.flush{stroke:var(--quiet);stroke-width:1;stroke-dasharray:2 3}\
.forward{fill:var(--forward)}\
.recompute{fill:var(--forward);fill-opacity:.6}\
.backward,.backward-input{fill:var(--backward)}\
.backward-weight{fill:var(--backward-weight)}\
.step{fill:var(--step)}\
.all-reduce{fill:var(--all-reduce)}\
.activation,.transfer{fill:var(--activation)}\
.gradient{fill:var(--gradient)}\
.wait{fill:var(--wait)}\
.on{font-size:10px;text-anchor:middle;pointer-events:none;font-variant-numeric:tabular-nums}\
.on-forward,.on-recompute,.on-step,.on-all-reduce{fill:var(--on-forward)}\
.on-backward,.on-backward-input,.on-backward-weight{fill:var(--on-backward)}\
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}\
.dashed{stroke-dasharray:5 4}\
.dotted{stroke-dasharray:1.5 4;stroke-linecap:round}\
.area{opacity:.22}\
.s0{fill:var(--forward)}.s1{fill:var(--activation)}.s2{fill:var(--backward)}.s3{fill:var(--purple)}\
.s4{fill:var(--step)}.s5{fill:var(--all-reduce)}.s6{fill:var(--grey)}.s7{fill:var(--backward-weight)}\
.l0{stroke:var(--forward)}.l1{stroke:var(--activation)}.l2{stroke:var(--backward)}.l3{stroke:var(--purple)}\
.l4{stroke:var(--step)}.l5{stroke:var(--all-reduce)}.l6{stroke:var(--grey)}\
.hollow{fill:var(--page);stroke-width:1.8}";

pub fn light(style: &str) -> String {
    COLOURS.iter().fold(style.to_string(), |style, (name, light, _)| style.replace(&format!("var(--{name})"), light))
}

/// Declarations of the variables, with dark values where the system prefers dark mode.
pub fn variables() -> String {
    let list = |value: fn(&(&str, &str, &str)) -> String| COLOURS.iter().map(value).collect::<String>();
    format!(
        ":root{{color-scheme:light dark;{}}}@media(prefers-color-scheme:dark){{:root{{{}}}}}",
        list(|(name, light, _)| format!("--{name}:{light};")),
        list(|(name, _, dark)| format!("--{name}:{dark};"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_variable_is_left_in_a_file_for_a_paper() {
        assert!(!light(PICTURE).contains("var("), "{}", light(PICTURE));
    }
}
