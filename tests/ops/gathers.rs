//! Programs with ZeRO: meaning of their instructions, times, and rejected programs.

use compiler::schedule::check::verify::check;
use compiler::schedule::formats::chart::chart;
use compiler::schedule::formats::json::{from_json, to_json};
use compiler::schedule::{Pipeline, Program, StageSpec};
use compiler::simulate::run::{Machine, simulate};

/// ZeRO 1 replicas, with instructions that schedules do not generate: checkpoints, and an optional recompute.
const SHARES: &str = "program gpipe {
  items 2
  microbatches 2
  stage 0 replicas=2 cap=1 zero=1
  worker 0.0 {
    load 0F0
    0F0
    recompute 0F0
    0B0
    reduce-scatter 0 round 0 #0
    wait #0
    step 0 round 0 v0 => v1 mean 2
    all-gather 0 v1 #1
    wait #1
    checkpoint 0 v1
  }
  worker 0.1 {
    load 0F1
    0F1
    recompute 0F1
    0B1
    reduce-scatter 0 round 0 #0
    wait #0
    step 0 round 0 v0 => v1 mean 2
    all-gather 0 v1 #1
    wait #1
  }
}
";

#[test]
fn forwards_run_again_and_weights_are_made_in_shares() {
    let program: Program = SHARES.parse().unwrap();
    check(&program).unwrap();
    assert_eq!(program.to_string(), SHARES);
    assert_eq!(from_json(&to_json(&program).unwrap()).unwrap(), program);
    assert_eq!(chart(&program).unwrap(), "0.0 | F0 R0 B0\n0.1 | F1 R1 B1\n");
    // Forward 2, recompute 2, rest of a backward of 6, and a reduce-scatter and all-gather for an all-reduce of 10.
    let mut stage = StageSpec::new(2, 2.0, 6.0);
    (stage.recompute, stage.all_reduce) = (Some(2.0), 10.0);
    let pipeline = Pipeline::chain(vec![stage]);
    let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
    let names: Vec<String> = timeline.workers[0].spans.iter().map(|span| span.activity.to_string()).collect();
    assert_eq!(names, ["0F0", "0R0", "0B0"]);
    assert_eq!(timeline.workers[0].spans[2].end, 8.0);
    assert_eq!((timeline.makespan, timeline.links[0].spans.len()), (18.0, 2));
}

/// Under ZeRO 3 no version is gathered as a whole, and a replica releases its shard after its last backward of a round.
#[test]
fn unsharded_weights_have_no_shard_commands() {
    let text = SHARES.replace("zero=1", "zero=3");
    let program: Program = text.parse().unwrap();
    check(&program).unwrap();
    let mut stage = StageSpec::new(2, 2.0, 6.0);
    (stage.recompute, stage.all_reduce) = (Some(2.0), 10.0);
    let pipeline = Pipeline::chain(vec![stage]);
    let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
    assert_eq!(timeline.makespan, 13.0);
    let late = |text: &str| text.replacen("    wait #0\n", "    checkpoint 0 v0\n    wait #0\n", 1);
    check(&late(SHARES).parse().unwrap()).unwrap();
    let error = check(&late(&text).parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("worker 0.0, instruction 5"), "{error}");
}

#[test]
fn shard_errors_are_located() {
    let lines: [(&str, &str, &str); 10] = [
        ("    recompute 0F1\n    0B1\n", "    0B1\n    recompute 0F1\n", "worker 0.1, instruction 3"),
        ("    recompute 0F1\n", "    recompute 0F1\n    recompute 0F1\n", "worker 0.1, instruction 3"),
        ("    recompute 0F1\n", "    recompute 0F1@v1\n", "worker 0.1, instruction 2"),
        ("    wait #1\n    checkpoint 0 v1\n", "    checkpoint 0 v1\n    wait #1\n", "has not been gathered"),
        ("    all-gather 0 v1 #1\n    wait #1\n    checkpoint 0 v1\n", "", "worker 0.0, at its end"),
        ("    reduce-scatter 0 round 0 #0\n", "    all-reduce 0 round 0 #0\n", "worker 0.0, instruction 4"),
        ("    wait #1\n    checkpoint 0 v1\n", "    drop 0 v1\n", "has not been gathered"),
        ("cap=1 zero=1", "cap=1", "whose rounds need all-reduces"),
        ("cap=1 zero=1", "cap=1 zero=9", "ZeRO has stages"),
        ("all-gather 0 v1 #1", "all-gather 0 v1 bucket 1 #1", "bucket 1 where bucket 0 is next"),
    ];
    for (right, wrong, expected) in lines {
        assert!(SHARES.contains(right));
        let text = SHARES.replacen(right, wrong, 1);
        let error = check(&text.parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains(expected), "`{wrong}`: {error}");
    }
}
