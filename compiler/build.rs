//! Compiles the official ONNX protobuf description with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/onnx.proto");
    let files = protox::compile(["proto/onnx.proto"], ["proto"])?;
    let mut config = prost_build::Config::new();
    // `Bytes` fields stay views into the memory map that the model was read from: no weight is copied.
    config.bytes(["."]);
    // The comments of the description are not Rust documentation.
    config.disable_comments(["."]);
    config.compile_fds(files)?;
    Ok(())
}
