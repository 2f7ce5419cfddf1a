//! The role of this process in a run, and how it connects to the others.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::input;
use crate::launch::children::Children;
use crate::launch::environment::from_environment;
use crate::launch::{children, run_token, signals};
use crate::{cluster, help};
use compiler::text::quantity;
use runtime::process::authentication::{RunToken, random_token};
use runtime::process::handshake::{Identity, RunInput};
use runtime::process::meeting::{Notice, ProcessConfig};
use runtime::process::placement::WorkerPlacement;
use runtime::process::process_group::{Connected, Group, JoinMode, connect, join, listen};
use runtime::process::run_status::{LinkError, RunStatus};
use runtime::train::job::TrainJob;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Maximum size of a cluster file in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Time for workers to notice that the run is over, before the process exits without them.
const GRACE: Duration = Duration::from_millis(700);
/// Interval between these checks.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Default limits of the time until all processes have connected, in seconds.
const SHORTEST_CONNECT_TIMEOUT: f64 = 30.0;
const LONGEST_CONNECT_TIMEOUT: f64 = 600.0;

/// The processes of a run and their timeouts.
#[derive(Clone, Debug)]
pub struct ProcessRequest {
    /// True if every worker, or every rank of its tensor-parallel group, runs in its own process on this machine.
    pub spawn: bool,
    /// A cluster file with the hosts of the run.
    pub hosts: Option<PathBuf>,
    /// The index of this host in the file; if absent, the host whose address is this machine's.
    pub host: Option<u32>,
    pub rank: Option<u32>,
    /// The address of process 0, `HOST:PORT`.
    pub address: Option<String>,
    /// The file with the run token; if absent, the environment may have it.
    pub token_file: Option<PathBuf>,
    /// Maximum time until all processes have connected; if absent, 30 s to 10 min, by the time that this process prepared.
    pub connect_timeout: Option<Duration>,
    /// When this process began to prepare.
    pub started: Instant,
    /// Time without a heartbeat after which a process counts as dead; 5 s if absent.
    pub deadline: Option<Duration>,
    /// Maximum number of restarts of all processes after one of them died.
    pub max_restarts: u32,
    /// True if processes exchange tensors over NCCL.
    pub nccl: bool,
    /// The checkpoint that spawned processes resume from.
    pub resumed: Option<PathBuf>,
    /// The environment of this process: launchers such as torchrun describe the run there.
    pub environment: BTreeMap<String, String>,
    /// The command that spawned processes run: program and arguments.
    pub command: Vec<OsString>,
    /// Ends this process when another one failed and the workers of this one do not return. Called on another thread.
    pub exit: fn(&Error) -> !,
}

impl Default for ProcessRequest {
    /// One process.
    fn default() -> ProcessRequest {
        ProcessRequest {
            spawn: false,
            hosts: None,
            host: None,
            rank: None,
            address: None,
            token_file: None,
            connect_timeout: None,
            started: Instant::now(),
            deadline: None,
            max_restarts: 0,
            nccl: false,
            resumed: None,
            environment: BTreeMap::new(),
            command: Vec::new(),
            exit: |_| std::process::exit(1),
        }
    }
}

impl ProcessRequest {
    /// The others prepare as long as this process did, or longer where several of them share its cores.
    fn connect_timeout(&self, processes: usize) -> Duration {
        let prepared = self.started.elapsed().as_secs_f64();
        let seconds = (2.0 * prepared * processes as f64).clamp(SHORTEST_CONNECT_TIMEOUT, LONGEST_CONNECT_TIMEOUT);
        self.connect_timeout.unwrap_or(Duration::from_secs_f64(seconds))
    }

    fn deadline(&self) -> Duration {
        self.deadline.unwrap_or(Duration::from_secs(5))
    }

    /// A flag without effect on a run of one process.
    fn unused_alone(&self) -> Option<&'static str> {
        let flags = [
            ("--token-file", self.token_file.is_some()),
            ("--connect-timeout", self.connect_timeout.is_some()),
            ("--deadline", self.deadline.is_some()),
        ];
        flags.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag)
    }

    /// The checkpoint to resume from, if a parent started this process and set one.
    pub fn resumed_by_parent(&self) -> Option<PathBuf> {
        self.environment.get(children::VARIABLE).and(self.environment.get(children::RESUMED)).map(PathBuf::from)
    }
}

/// What processes must have in common, by name.
pub type RunInputs = Vec<(String, RunInput)>;

/// The inputs of a run with this placement.
pub type InputsFor<'a> = &'a dyn Fn(&WorkerPlacement) -> RunInputs;

/// The role of this process in a run.
pub enum ProcessRole {
    /// The only process.
    Alone,
    /// The process that starts the others and reports.
    Parent,
    /// One of several processes started elsewhere.
    Member(Member),
}

/// One process of several.
pub struct Member {
    process: usize,
    distribution: WorkerDistribution,
    first_address: String,
    listen: Option<String>,
    run: u64,
    restarts: u32,
    uses_mpi: bool,
    token: RunToken,
}

/// The distribution of ranks over processes: workers, or with tensor parallelism the ranks of their groups.
enum WorkerDistribution {
    /// One for each process except the first.
    Beside,
    /// One for each process.
    Each,
    /// In order over this number of processes.
    Processes(usize),
    /// This number for each host.
    Hosts(Vec<u32>),
}

impl ProcessRole {
    /// The role that the flags and the environment set.
    pub fn find(arguments: &ProcessRequest) -> Result<ProcessRole, Error> {
        let role = ProcessRole::detect(arguments)?;
        if let ProcessRole::Member(member) = &role
            && !member.uses_mpi
        {
            let addresses = [Some(&member.first_address), member.listen.as_ref()];
            run_token::check(&member.token, &addresses.into_iter().flatten().map(String::as_str).collect::<Vec<_>>())?;
        }
        Ok(role)
    }

    fn detect(arguments: &ProcessRequest) -> Result<ProcessRole, Error> {
        let token = || run_token::find_token(arguments);
        if let Some(variable) = arguments.environment.get(children::VARIABLE) {
            let token = token()?;
            return child_member(variable, token).map(ProcessRole::Member).ok_or_else(|| {
                Error::input(format!(
                    "the variable {} may be set only by `pipec train --processes`",
                    children::VARIABLE
                ))
            });
        }
        if arguments.spawn {
            return Ok(ProcessRole::Parent);
        }
        if arguments.max_restarts > 0 {
            return Err(Error::input("`--max-restarts` requires `--processes`")
                .with_help("processes that are started elsewhere are restarted there: with `--checkpoint-dir` and `--resume` they continue"));
        }
        if let Some(path) = &arguments.hosts {
            let text = input::text(path, MOST_BYTES)?;
            let cluster = cluster::from_toml(&text, path)?;
            let hosts: Vec<(String, u32)> =
                cluster.hosts.into_iter().map(|host| (host.address, host.devices)).collect();
            let Some((first, _)) = hosts.first() else {
                return Err(Error::file("use the cluster", path, "it has no hosts").with_help(
                    "add a table `[[host]]` with `address = \"NAME:PORT\"` and `devices = N` for each host",
                ));
            };
            let first = arguments.address.clone().unwrap_or(first.clone());
            if let Some(rank) = arguments.rank {
                return Ok(ProcessRole::Member(Member::with_rank(rank, first, token()?)));
            }
            let process = match arguments.host {
                Some(host) => host as usize,
                None => own_host(&hosts)?,
            };
            let Some((address, _)) = hosts.get(process) else {
                let message =
                    format!("`--host {process}`: {} has {} hosts, counted from 0", path.display(), hosts.len());
                return Err(Error::input(message));
            };
            let listen = Some(address.clone());
            let distribution = WorkerDistribution::Hosts(hosts.iter().map(|(_, devices)| *devices).collect());
            let token = token()?;
            let addresses: Vec<&str> = hosts.iter().map(|(address, _)| address.as_str()).collect();
            run_token::check(&token, &addresses)?;
            run_token::check_reachable(&addresses, process)?;
            let member = Member { process, distribution, listen, ..Member::with_rank(0, first, token) };
            return Ok(ProcessRole::Member(member));
        }
        if let (Some(rank), Some(address)) = (arguments.rank, &arguments.address) {
            return Ok(ProcessRole::Member(Member::with_rank(rank, address.clone(), token()?)));
        }
        let launched = from_environment(&|name| arguments.environment.get(name).cloned());
        let launched =
            launched.map_err(|why| Error::input("cannot read the launcher's environment variables").because(why))?;
        let Some(launched) = launched else {
            return match arguments.rank {
                Some(_) => Err(Error::input("`--rank` requires the address of process 0")
                    .with_help("add `--address HOST:PORT`, the same for all processes, or `--hosts cluster.toml`")),
                None if arguments.address.is_some() => Err(Error::input(
                    "`--address` requires the rank of this process",
                )
                .with_help(
                    "add `--rank N` for each process, or start them with mpirun, srun or torchrun, which set the rank",
                )),
                None => match arguments.unused_alone() {
                    Some(flag) => Err(Error::input(format!("`{flag}` is for several processes, but this run has one"))
                        .with_help("omit it, or add `--processes`, `--hosts`, or `--rank` and `--address`")),
                    None => Ok(ProcessRole::Alone),
                },
            };
        };
        let address = arguments.address.clone().or(launched.address);
        let uses_mpi = cfg!(feature = "mpi") && launched.has_mpi && address.is_none() && arguments.rank.is_none();
        let Some(first) = address.or_else(|| uses_mpi.then(|| "rank 0".to_string())) else {
            let message = format!(
                "this is process {} of {}, but the address of process 0 is unknown",
                launched.rank, launched.processes
            );
            return Err(Error::input(message).with_help("add `--address HOST:PORT`, the same for all processes"));
        };
        let digest = Sha256::digest(launched.run.as_bytes());
        let run = digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
        let rank = arguments.rank.map_or(launched.rank, |rank| rank as usize);
        let listen = Some(first.clone()).filter(|_| rank == 0 && !uses_mpi);
        let distribution = WorkerDistribution::Processes(launched.processes);
        let token = token()?;
        let member =
            Member { process: rank, distribution, listen, run, uses_mpi, ..Member::with_rank(0, first, token) };
        Ok(ProcessRole::Member(member))
    }

    /// True for the one process that reports on the run.
    pub fn is_reporter(&self) -> bool {
        match self {
            ProcessRole::Alone | ProcessRole::Parent => true,
            ProcessRole::Member(member) => member.process == 0,
        }
    }

    /// Number of restarts of the run before this process was started.
    pub fn restarts(&self) -> u32 {
        match self {
            ProcessRole::Alone | ProcessRole::Parent => 0,
            ProcessRole::Member(member) => member.restarts,
        }
    }

    /// Runs a training job with the other processes, which must have equal `inputs`. `run` gets the process group, if
    /// there are others. `degree` is the tensor-parallel degree. `events` receives the events of the run, `process_events` those of
    /// this process.
    pub fn run<T>(
        &self,
        arguments: &ProcessRequest,
        (job, degree, inputs): (&TrainJob<'_>, usize, InputsFor<'_>),
        restarts: u32,
        (events, process_events): (&dyn EventSink, &dyn EventSink),
        run: impl FnOnce(Option<Group>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let workers = job.program.workers.len();
        let run_status = Arc::new(RunStatus::default());
        // Processes started together connect at once; a wait for others means that users start them by hand.
        let is_own =
            matches!(self, ProcessRole::Member(member) if !matches!(member.distribution, WorkerDistribution::Beside));
        let notice = |notice| match notice {
            Notice::Waits(whom) if is_own => process_events.note(&whom),
            Notice::Waits(_) => {}
            Notice::SentAway(whom) if is_own => process_events.warn(&whom),
            Notice::SentAway(whom) => events.warn(&whom),
        };
        let join_group = |config: ProcessConfig, mode: JoinMode| {
            let lines = config.placement.lines(job.program, job.codes, runtime::train::run::shares_norm(job));
            join(job.program, &lines, config, mode, run_status.clone(), &notice).map_err(connect_error)
        };
        let inputs_with_placement = |placement: &WorkerPlacement| {
            let mut inputs = inputs(placement);
            inputs.push(("`--nccl`".to_string(), RunInput::Setting(arguments.nccl.to_string())));
            let processes: Vec<String> =
                placement.processes_of_ranks.iter().map(|process| process.to_string()).collect();
            inputs.push(("process of each rank".to_string(), RunInput::setting(processes.join(","))));
            inputs
        };
        let config =
            |own: usize, placement: WorkerPlacement, first: String, (run, token): (u64, RunToken)| ProcessConfig {
                process: own,
                identity: Identity { run, inputs: inputs_with_placement(&placement) },
                placement,
                token,
                first_address: first,
                listen: match self {
                    ProcessRole::Member(member) if own > 0 => member.listen.clone(),
                    _ => None,
                },
                connect_timeout: arguments.connect_timeout(workers),
                deadline: arguments.deadline(),
                nccl: arguments.nccl,
                follows: matches!(self, ProcessRole::Member(Member { distribution: WorkerDistribution::Beside, .. })),
            };
        match self {
            ProcessRole::Alone => run(None),
            ProcessRole::Parent => {
                let port = listen("127.0.0.1:0").map_err(connect_error)?;
                let address =
                    port.local_addr().map_err(|error| Error::negative("cannot listen").because(error))?.to_string();
                let placement = WorkerPlacement::beside(workers, degree);
                let names: Vec<String> =
                    (1..placement.processes).map(|process| placement.name(job.program, process)).collect();
                let run_number = new_run_number();
                let secret = random_token()
                    .map_err(|why| Error::negative("cannot start the processes of the run").because(why))?;
                let token = RunToken::of(&secret).unwrap_or_default();
                let children: Children = children::start(
                    &names,
                    (run_number, restarts, &address, &secret),
                    (&arguments.command, arguments.resumed.as_deref()),
                    arguments.deadline(),
                    &run_status,
                )?;
                let group = join_group(config(0, placement, address, (run_number, token)), JoinMode::Port(port));
                children.end(group.and_then(|group| run(Some(group))))
            }
            ProcessRole::Member(member) => {
                let placement = member.placement(workers, degree)?;
                let mode = match member.port()? {
                    _ if member.uses_mpi => over_mpi(&placement, member.process, events)?,
                    Some(port) => JoinMode::Port(port),
                    None => JoinMode::Outside,
                };
                let credentials = (member.run, member.token.clone());
                let group =
                    join_group(config(member.process, placement, member.first_address.clone(), credentials), mode)?;
                let is_over = exit_when_over(run_status.clone(), arguments.exit);
                let result = run(Some(group));
                is_over.store(true, Ordering::Relaxed);
                result
            }
        }
    }
}

impl Member {
    /// The number of this process.
    pub fn number(&self) -> usize {
        self.process
    }

    /// Connects to the other processes, which have these names and equal inputs and no program. `lines` lists the pairs
    /// that need a connection.
    pub fn connect(
        &self,
        request: &ProcessRequest,
        (names, lines, inputs): (Vec<String>, &BTreeSet<(usize, usize)>, RunInputs),
        run_status: &Arc<RunStatus>,
        notice: &dyn Fn(Notice),
    ) -> Result<Connected, Error> {
        let config = ProcessConfig {
            process: self.process,
            placement: WorkerPlacement { processes_of_ranks: Vec::new(), processes: names.len(), degree: 1 },
            identity: Identity { run: self.run, inputs },
            token: self.token.clone(),
            first_address: self.first_address.clone(),
            listen: self.listen.clone().filter(|_| self.process > 0),
            connect_timeout: request.connect_timeout(1),
            deadline: request.deadline(),
            nccl: false,
            follows: false,
        };
        let port = self.port()?;
        connect(names, lines, &config, port.map_or(JoinMode::Outside, JoinMode::Port), run_status, notice)
            .map_err(connect_error)
    }

    /// The port of process 0.
    fn port(&self) -> Result<Option<TcpListener>, Error> {
        let address = self.listen.as_deref().filter(|_| self.process == 0);
        address.map(listen).transpose().map_err(connect_error)
    }

    /// The process of this number, with one process per rank and process 0 at address `first`.
    fn with_rank(rank: u32, first: String, token: RunToken) -> Member {
        let listen = Some(first.clone()).filter(|_| rank == 0);
        Member {
            process: rank as usize,
            distribution: WorkerDistribution::Each,
            first_address: first,
            listen,
            run: 0,
            restarts: 0,
            uses_mpi: false,
            token,
        }
    }

    fn placement(&self, workers: usize, degree: usize) -> Result<WorkerPlacement, Error> {
        let (placement, capacity) = match &self.distribution {
            WorkerDistribution::Beside => {
                (Some(WorkerPlacement::beside(workers, degree)), "one process for each".to_string())
            }
            WorkerDistribution::Each => {
                (WorkerPlacement::even(workers, degree, workers * degree), "one process for each".to_string())
            }
            WorkerDistribution::Processes(count) => {
                (WorkerPlacement::even(workers, degree, *count), format!("{count} processes"))
            }
            WorkerDistribution::Hosts(devices) => {
                let total: u64 = devices.iter().map(|count| u64::from(*count)).sum();
                (WorkerPlacement::by_host(workers, degree, devices), format!("{total} devices on the hosts"))
            }
        };
        let workers_text = quantity::plural(workers as u64, "worker", "workers");
        let (workers_text, unit) = match degree {
            1 => (workers_text, "worker"),
            _ => (format!("{workers_text} of {degree} tensor-parallel devices"), "device"),
        };
        let placement = placement.ok_or_else(|| {
            Error::input(format!("the plan has {workers_text}, but there are {capacity}")).with_help(format!(
                "start at most one process per {unit}, or plan for as many devices as the hosts have"
            ))
        })?;
        match self.process < placement.processes {
            true => Ok(placement),
            false => Err(Error::input(format!(
                "this is process {}, but the plan has {workers_text}: processes are counted from 0",
                self.process
            ))
            .with_help(format!("use `--rank 0` to `--rank {}`", placement.processes - 1))),
        }
    }
}

#[cfg(feature = "mpi")]
fn over_mpi(placement: &WorkerPlacement, process: usize, events: &dyn EventSink) -> Result<JoinMode, Error> {
    let mpi = runtime::process::mpi::open().map_err(connect_error)?;
    if (mpi.rank, mpi.processes) != (process, placement.processes) {
        let (rank, processes) = (mpi.rank, mpi.processes);
        return Err(Error::input(format!(
            "by the environment this is process {process} of {}, by {} it is process {rank} of {processes}",
            placement.processes, mpi.library
        ))
        .with_help("use the launcher of the MPI library that pipec is linked with, or `--address HOST:PORT` for TCP"));
    }
    events.note(&format!("connected by MPI: {}", mpi.library));
    Ok(JoinMode::Open(mpi.streams, Box::new(mpi.carrier)))
}

/// This build has no MPI.
#[cfg(not(feature = "mpi"))]
fn over_mpi(_: &WorkerPlacement, _: usize, _: &dyn EventSink) -> Result<JoinMode, Error> {
    Err(Error::bug("MPI requested in a build without MPI"))
}

/// The error for processes that could not connect.
fn connect_error(error: LinkError) -> Error {
    let help = help::link(&error);
    let failure = match error {
        LinkError::Bug { .. } => Error::bug(&error.to_string()),
        LinkError::Address { .. } | LinkError::Exposed { .. } => {
            Error::input("the processes of the run cannot connect").because(&error)
        }
        _ => Error::negative("the processes of the run did not connect").because(&error),
    };
    help.into_iter().fold(failure, Error::with_help)
}

/// Reads the variable that a parent sets for its child. The child ends when the parent ends.
fn child_member(variable: &str, token: RunToken) -> Option<Member> {
    let mut fields = variable.split(' ');
    let parent: u32 = fields.next()?.parse().ok()?;
    let process = fields.next()?.parse().ok().filter(|process| *process > 0)?;
    let run = u64::from_str_radix(fields.next()?, 16).ok()?;
    let restarts = fields.next()?.parse().ok()?;
    let first = fields.next()?.to_string();
    if !signals::follow(parent) {
        // The parent has ended, so there is nobody to report to.
        std::process::exit(1);
    }
    let distribution = WorkerDistribution::Beside;
    Some(Member { process, distribution, listen: None, run, restarts, ..Member::with_rank(0, first, token) })
}

/// A number that is unlikely to be used by another run.
fn new_run_number() -> u64 {
    let nanoseconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    nanoseconds ^ u64::from(std::process::id()) << 40
}

/// The host whose address is this machine's.
fn own_host(hosts: &[(String, u32)]) -> Result<usize, Error> {
    let is_here = |address: &IpAddr| TcpListener::bind((*address, 0)).is_ok();
    let is_own = |(address, _): &(String, u32)| {
        address.to_socket_addrs().is_ok_and(|addresses| addresses.map(|address| address.ip()).any(|ip| is_here(&ip)))
    };
    let matching: Vec<usize> = hosts.iter().enumerate().filter(|(_, host)| is_own(host)).map(|(at, _)| at).collect();
    match matching[..] {
        [host] => Ok(host),
        [] => {
            let is_unknown = |(address, _): &&(String, u32)| address.to_socket_addrs().is_err();
            let unknown: Vec<&str> = hosts.iter().filter(is_unknown).map(|(address, _)| address.as_str()).collect();
            let failure = Error::input("no host has an address of this machine");
            Err(match &unknown[..] {
                [] => failure.with_help("set the index of this host with `--host N`"),
                _ => failure
                    .because(format!("this machine cannot resolve {}", unknown.join(", ")))
                    .with_help("write names that every host can resolve, or IP addresses"),
            })
        }
        _ => {
            let numbers = matching.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            Err(Error::input(format!("hosts {numbers} all have an address of this machine"))
                .with_help("set the index of this host with `--host N`"))
        }
    }
}

/// Exits the process when the run is over and its workers do not notice because one is computing; the launcher waits for the exit.
fn exit_when_over(run_status: Arc<RunStatus>, exit: fn(&Error) -> !) -> Arc<AtomicBool> {
    let is_over = Arc::new(AtomicBool::new(false));
    let is_done = is_over.clone();
    let watcher = move || {
        while !is_done.load(Ordering::Relaxed) && !run_status.is_released() {
            if let Some(cause) = run_status.cause() {
                thread::sleep(GRACE);
                if !is_done.load(Ordering::Relaxed) {
                    exit(&Error::negative("training stopped").because(cause));
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
    };
    // Without this thread the process exits a little later.
    let _ = thread::Builder::new().name("hurry".into()).spawn(watcher);
    is_over
}
