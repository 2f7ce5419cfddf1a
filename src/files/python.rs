//! Runs the user's Python with a script that pipec carries. The script reads a request as JSON from standard input and
//! writes one JSON object per line.

use crate::error::Error;
use compiler::text::name::short_name;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, thread};

/// The Python: the given one, else that of the virtual environment, else `python3`.
pub fn find(requested: Option<&Path>) -> PathBuf {
    let of_environment = || {
        let folder = PathBuf::from(env::var_os("VIRTUAL_ENV")?);
        let names = [folder.join("bin/python"), folder.join("Scripts/python.exe")];
        names.into_iter().find(|python| python.exists())
    };
    requested.map(Path::to_path_buf).or_else(of_environment).unwrap_or_else(|| PathBuf::from("python3"))
}

/// Runs a script with this request and passes on every line that is a JSON object. A line `{"error": …, "help": …}` ends
/// it with that error. `failed` makes an error of its reason.
pub fn run(
    python: &Path,
    script: &str,
    request: &Value,
    on_line: &mut dyn FnMut(Value),
    failed: &dyn Fn(String) -> Error,
) -> Result<(), Error> {
    let mut command = Command::new(python);
    command.arg("-c").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| {
        failed(format!("{}: {error}", python.display())).with_help("name the Python with torch with `--python PATH`")
    })?;
    let (input, output, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut input), Some(output), Some(mut stderr)) = (input, output, stderr) else {
        return Err(failed("the child process has no pipes".to_string()));
    };
    // A script that ends early closes its input; its lines say why.
    let _ = input.write_all(request.to_string().as_bytes());
    drop(input);
    // Warnings of Python must not fill the pipe.
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut script_error = None;
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        // The model may print, too.
        let Ok(line @ Value::Object(_)) = serde_json::from_str::<Value>(&line) else { continue };
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_string();
        match line.get("error") {
            Some(_) => {
                let help = Some(text("help")).filter(|help| !help.is_empty());
                let error = help.into_iter().fold(failed(text("error")), Error::with_help);
                script_error = script_error.or(Some(error));
            }
            None => on_line(line),
        }
    }
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    let text = reader.join().unwrap_or_default();
    match script_error {
        Some(script_error) => Err(script_error),
        None if status.success() => Ok(()),
        None => {
            let last_line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
            Err(failed(format!("Python ended with {status}: {}", short_name(last_line))))
        }
    }
}
