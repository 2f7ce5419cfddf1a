//! The process and host flags of `pipec train`.

use clap::Args;
use pipec::error::Error;
use pipec::launch::role::ProcessRequest;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, iter};

/// Process and host flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Processes and hosts")]
pub struct ProcessArguments {
    /// Run one process per worker on this machine, one per device with tensor parallelism; if one fails, all end
    #[arg(long, conflicts_with_all = ["hosts", "rank", "address"])]
    pub processes: bool,
    /// Run on the hosts of this cluster file ([[host]] address = "NAME:PORT", devices = N); start the same command on each
    #[arg(long, value_name = "FILE")]
    pub hosts: Option<PathBuf>,
    /// Index of this host in the file, counted from 0 [default: the host whose address is this machine's]
    #[arg(long, value_name = "N", requires = "hosts", conflicts_with = "rank")]
    pub host: Option<u32>,
    /// Run only this rank; the others are started elsewhere. Under torchrun, mpirun and srun it is read from the environment
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,
    /// Address of process 0 [default: the first host's, or from the launcher's environment]
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// File with the run token, a secret that all processes share [default: the variable PIPEC_RUN_TOKEN]. Required if other machines can reach the processes
    #[arg(long, value_name = "FILE", conflicts_with = "processes")]
    pub token_file: Option<PathBuf>,
    /// Seconds to wait for all processes to connect [default: 30, or up to 600 if this process needed long to prepare]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub connect_timeout: Option<Duration>,
    /// Seconds without a heartbeat after which a process counts as failed [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub deadline: Option<Duration>,
    /// Maximum number of times to restart all processes when one of them dies
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub max_restarts: u32,
    /// Exchange tensors of processes with one GPU each over NCCL; tested with a simulated library only
    #[arg(long)]
    pub nccl: bool,
}

impl ProcessArguments {
    /// The requested processes; `exit` ends this process with an error.
    pub fn request(&self, exit: fn(&Error) -> !) -> Result<ProcessRequest, Error> {
        let arguments = self.clone();
        let program = env::current_exe()
            .map_err(|error| Error::negative("cannot start the processes of the run").because(error))?;
        Ok(ProcessRequest {
            spawn: arguments.processes,
            hosts: arguments.hosts,
            host: arguments.host,
            rank: arguments.rank,
            address: arguments.address,
            token_file: arguments.token_file,
            connect_timeout: arguments.connect_timeout,
            started: Instant::now(),
            deadline: arguments.deadline,
            max_restarts: arguments.max_restarts,
            nccl: arguments.nccl,
            resumed: None,
            environment: environment(),
            command: iter::once(program.into_os_string()).chain(env::args_os().skip(1)).collect(),
            exit,
        })
    }
}

/// The environment of this process.
pub fn environment() -> BTreeMap<String, String> {
    let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    variables.map(|(name, value)| (name, value.to_string_lossy().into_owned())).collect()
}

/// Reads a timeout: at least two heartbeats, at most a day.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let value = text.parse::<f64>().ok().filter(|seconds| (2.0..=86_400.0).contains(seconds));
    value.map(Duration::from_secs_f64).ok_or_else(|| "it must be a number of seconds from 2 to 86400".to_string())
}
