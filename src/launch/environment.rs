//! The environment variables of `torchrun`, `mpirun` and `srun`.
//!
//! | launcher | rank | processes | address of process 0 |
//! | --- | --- | --- | --- |
//! | torchrun | `RANK` | `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | MPI, or `--address` |
//! | MPICH, Intel MPI, PMI | `PMI_RANK` | `PMI_SIZE` | MPI, or `--address` |
//! | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` | `--address` |
//!
//! Without the feature `mpi`, only `--address` is available. `MASTER_ADDR` and `MASTER_PORT` are read under all launchers. If torchrun's
//! agent listens at the port, process 0 uses the next one. Variables that Slurm sets in a batch script, outside of a step, are ignored.

/// A process that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The rank of the process.
    pub rank: usize,
    /// The number of processes, more than one.
    pub processes: usize,
    /// The address of process 0, if the launcher sets it.
    pub address: Option<String>,
    /// Identifies this start of the processes.
    pub run: String,
    /// True if the launcher starts MPI programs.
    pub has_mpi: bool,
}

/// The variables of the rank and the number of processes, and a variable that must also be set.
const LAUNCHERS: [(&str, &str, Option<&str>); 4] = [
    ("RANK", "WORLD_SIZE", None),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    ("PMI_RANK", "PMI_SIZE", None),
    ("SLURM_PROCID", "SLURM_NTASKS", Some("SLURM_STEP_ID")),
];

/// Variables that differ between starts.
const START_VARIABLES: [&str; 5] =
    ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"];

/// The process described by the environment; `None` if no launcher started several processes.
pub fn from_environment(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launched>, String> {
    for (rank_name, size_name, required) in LAUNCHERS {
        let (Some(rank_value), Some(count)) = (get(rank_name), get(size_name)) else { continue };
        if required.is_some_and(|name| get(name).is_none()) {
            continue;
        }
        let number = |name: &str, text: &str| {
            text.trim().parse::<u32>().map_err(|_| format!("the variable {name} is `{text}`, which is not a number"))
        };
        let (rank_value, count) = (number(rank_name, &rank_value)?, number(size_name, &count)?);
        if count <= 1 {
            continue;
        }
        if rank_value >= count {
            return Err(format!("the variable {rank_name} is {rank_value}, but {size_name} is {count}"));
        }
        let run = START_VARIABLES.iter().map(|name| get(name).unwrap_or_default()).collect::<Vec<_>>().join(" ");
        let has_mpi = rank_name.starts_with("OMPI") || rank_name.starts_with("PMI");
        return Ok(Some(Launched {
            rank: rank_value as usize,
            processes: count as usize,
            address: address(get)?,
            run,
            has_mpi,
        }));
    }
    Ok(None)
}

fn address(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<String>, String> {
    let (Some(host), Some(port)) = (get("MASTER_ADDR"), get("MASTER_PORT")) else { return Ok(None) };
    let agent_listens = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let listen_port = port.trim().parse::<u16>().ok().and_then(|port| port.checked_add(u16::from(agent_listens)));
    let port = listen_port.ok_or_else(|| format!("the variable MASTER_PORT is `{port}`, which is not a port"))?;
    let is_v6 = host.contains(':') && !host.starts_with('[');
    Ok(Some(if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &[(&str, &str)]) -> Result<Option<Launched>, String> {
        from_environment(&|name| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| value.to_string()))
    }

    fn rank_and_address(variables: &[(&str, &str)]) -> (usize, usize, Option<String>) {
        let launched = detect(variables).unwrap().unwrap();
        (launched.rank, launched.processes, launched.address)
    }

    #[test]
    fn every_launcher_is_understood() {
        let torchrun = [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        assert_eq!(rank_and_address(&torchrun), (1, 4, Some("10.0.0.1:29500".into())));
        let with_agent = [&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(rank_and_address(&with_agent).2.as_deref(), Some("10.0.0.1:29501"));
        assert_eq!(rank_and_address(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")]), (0, 2, None));
        assert_eq!(rank_and_address(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), (1, 2, None));
        let step = [("SLURM_PROCID", "2"), ("SLURM_NTASKS", "3"), ("SLURM_STEP_ID", "0"), ("MASTER_ADDR", "::1")];
        assert_eq!(rank_and_address(&[&step[..], &[("MASTER_PORT", "7")]].concat()), (2, 3, Some("[::1]:7".into())));
    }

    #[test]
    fn nothing_is_made_up() {
        assert_eq!(detect(&[]), Ok(None));
        assert_eq!(detect(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        assert_eq!(detect(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None), "a batch script");
        for wrong in [[("RANK", "x"), ("WORLD_SIZE", "2")], [("RANK", "2"), ("WORLD_SIZE", "2")]] {
            assert!(detect(&wrong).is_err(), "{wrong:?}");
        }
        let port = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")];
        assert!(detect(&port).unwrap_err().contains("MASTER_PORT"));
    }
}
