//! Suggested commands.

use std::path::Path;

/// A path as a word of a shell command: quoted if it has characters that a shell interprets.
pub fn word(path: &Path) -> String {
    let text = path.display().to_string();
    // Not a flag.
    let text = if text.starts_with('-') { format!("./{text}") } else { text };
    let is_plain = |letter: char| letter.is_alphanumeric() || "/._-+,:@%=".contains(letter);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::word;
    use std::path::Path;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        let words = ["a/b-1.onnx", "my model.onnx", "it's.onnx", "$HOME.onnx", "modèle.onnx", "-m.onnx", ""];
        let quoted = words.map(|path| word(Path::new(path)));
        assert_eq!(
            quoted,
            ["a/b-1.onnx", "'my model.onnx'", r"'it'\''s.onnx'", "'$HOME.onnx'", "modèle.onnx", "./-m.onnx", "''"]
        );
    }
}
