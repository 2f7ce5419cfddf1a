//! A trained model is written whatever else fails, files of other programs are never replaced, and data that does not
//! match is refused before the first step.

use crate::diverged::expect_exit;
use compiler::tensor::Tensor;
use runtime::data::weights;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

const TRAIN: &str = "train m.onnx --synthetic-data --batch 4 --steps 2";

fn with_model() -> (PathBuf, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    expect_exit(folder.path(), 0, "zoo mlp --inputs 6 --classes 3 --hidden 8 -o m.onnx -q");
    (folder.path().to_path_buf(), folder)
}

#[cfg(target_os = "linux")]
#[test]
fn weights_are_written_though_the_metrics_cannot_be() {
    let (root, _folder) = with_model();
    let flags = "--metrics /dev/full --save w.safetensors --checkpoint-dir c";
    let (_, stderr) = expect_exit(&root, 1, &format!("{TRAIN} {flags}"));
    assert!(stderr.contains("not all of its results were written") && stderr.contains("/dev/full"), "{stderr}");
    expect_exit(&root, 0, &format!("{TRAIN} --save again.safetensors"));
    let read = |name: &str| fs::read(root.join(name)).unwrap();
    assert_eq!(read("w.safetensors"), read("again.safetensors"));
    assert_eq!(read("c/weights.safetensors"), read("again.safetensors"));
}

#[test]
fn files_of_other_programs_are_kept() {
    let (root, _folder) = with_model();
    fs::create_dir(root.join("c")).unwrap();
    for (name, flag) in [("w.npz", "--save w.npz"), ("c/weights.safetensors", "--checkpoint-dir c")] {
        let path = root.join(name);
        weights::write(&path, &[("a".to_string(), Tensor::from_f32(&[1], &[1.0]))].into()).unwrap();
        let own = fs::read(&path).unwrap();
        let at = own.windows(5).rposition(|word| word == b"pipec").unwrap();
        let other = [&own[..at], b"other", &own[at + 5..]].concat();
        fs::write(&path, &other).unwrap();
        assert!(expect_exit(&root, 2, &format!("{TRAIN} {flag}")).1.contains("file written by pipec"));
        assert_eq!(fs::read(&path).unwrap(), other);
        fs::write(&path, &own).unwrap();
        expect_exit(&root, 0, &format!("{TRAIN} {flag}"));
    }
}

#[test]
fn as_many_rows_as_a_batch_are_not_all_rows() {
    let (root, _folder) = with_model();
    for (name, rows, labels) in [("d.npz", 12, 12), ("few.npz", 4, 12), ("fewer.npz", 12, 4)] {
        let x = ("x".to_string(), Tensor::from_f32(&[rows, 6], &vec![0.5; rows * 6]));
        let y = ("y".to_string(), Tensor::from_i64(&[labels], &vec![1; labels]));
        weights::write(&root.join(name), &[x, y].into()).unwrap();
    }
    for data in ["few.npz", "fewer.npz", "d.npz --eval-data few.npz", "d.npz --eval-data fewer.npz"] {
        let (_, stderr) = expect_exit(&root, 2, &format!("train m.onnx --data {data} --batch 4"));
        assert!(stderr.contains("data does not match the model") && stderr.contains("has 4"), "{stderr}");
    }
}
