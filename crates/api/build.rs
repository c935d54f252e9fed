//! Turns `proto/` into Rust, without a system protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = protox::compile(["evenhand/v1/client.proto", "evenhand/v1/worker.proto"], [root])?;
    tonic_prost_build::configure()
        .codec_path("crate::codec::Bounded")
        .bytes(".evenhand.v1.NewTask.payload")
        .bytes(".evenhand.v1.File.content")
        .bytes(".evenhand.v1.Start.payload")
        .bytes(".evenhand.v1.Ended.result")
        .bytes(".evenhand.v1.RunEnded.result")
        .bytes(".evenhand.v1.Task.result")
        .bytes(".evenhand.v1.PayloadResponse.payload")
        .bytes(".evenhand.v1.AttachRequest.stdin")
        .bytes(".evenhand.v1.AttachResponse.stdout")
        .bytes(".evenhand.v1.AttachResponse.stderr")
        .bytes(".evenhand.v1.InteractiveUp.stdout")
        .bytes(".evenhand.v1.InteractiveUp.stderr")
        .bytes(".evenhand.v1.InteractiveDown.stdin")
        .compile_fds(files)?;
    Ok(())
}
