//! Names of untrusted files for display.
//!
//! A name in a model file is arbitrary UTF-8: empty, duplicated, a path, or terminal escape codes. The compiler keeps
//! names unchanged internally; all output passes through [`display_name`].

use std::borrow::Cow;

/// Maximum length in characters of the result of [`short_name`].
const SHORT: usize = 120;

/// `name` without characters that control a terminal: control characters (such as ESC and NUL), line separators and
/// bidirectional formatting marks.
///
/// ```
/// use compiler::text::name::display_name;
/// assert_eq!(display_name("\u{1b}[31mred\0"), "[31mred");
/// ```
pub fn display_name(name: &str) -> Cow<'_, str> {
    if name.chars().any(acts_on_terminal) {
        Cow::Owned(name.chars().filter(|c| !acts_on_terminal(*c)).collect())
    } else {
        Cow::Borrowed(name)
    }
}

/// [`display_name`], shortened in the middle to 120 characters for use in messages: a name may be megabytes long.
pub fn short_name(name: &str) -> String {
    let name = display_name(name);
    if name.len() <= SHORT || name.chars().count() <= SHORT {
        return name.into_owned();
    }
    let half = SHORT / 2 - 1;
    let head: String = name.chars().take(half).collect();
    let tail: Vec<char> = name.chars().rev().take(half).collect();
    format!("{head}…{}", tail.into_iter().rev().collect::<String>())
}

fn acts_on_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_no_escape_codes_and_no_direction_marks() {
        assert_eq!(display_name("\u{1b}]0;x\u{7}\u{9b}31m\u{202e}é"), "]0;x31mé");
        assert!(short_name(&"x".repeat(1 << 20)).chars().count() <= SHORT);
    }
}
