//! Settings: a flag goes before the environment, the environment before the file, the file before the default.
//!
//! There is no second list of settings. A section of the file belongs to a command, and its fields are that
//! command's flags that have a variable. What the file says becomes the default of the flag before the command line
//! is read, so clap decides which value counts, checks it, and knows where it came from.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{Arg, Args as ClapArgs, Command, CommandFactory, FromArgMatches, Subcommand};
use serde::Serialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::table::{Cell, Table, column, of};
use crate::terminal::{Look, print, print_json, say};
use crate::{Cli, Done, Failure, serve};

/// Where a file is looked for, if nobody names one.
const PLACES: [&str; 2] = ["evenhand.toml", "/etc/evenhand/evenhand.toml"];

/// A section of the file. The first command has all of its fields, the others some.
struct Section {
    name: &'static str,
    commands: &'static [&'static str],
}

const SECTIONS: [Section; 3] = [
    Section {
        name: "client",
        commands: &[
            "status", "submit", "get", "watch", "attach", "explain", "shorten", "cancel", "replay", "list",
            "queues", "queue", "workers", "gate", "top",
        ],
    },
    Section { name: "serve", commands: &["serve", "dev"] },
    Section { name: "worker", commands: &["worker"] },
];

/// Whether a command has settings that a file can have.
fn is_told(command: &str) -> bool {
    SECTIONS.iter().any(|section| section.commands.contains(&command))
}

/// A section's fields, as its command has them. The worker's command has no variable: it is a list of words.
fn fields<'a>(command: &'a Command, section: &Section) -> Vec<&'a Arg> {
    let is_field =
        |arg: &&Arg| arg.get_env().is_some() && arg.get_id() != "config" || arg.get_id() == "command";
    let told = command.find_subcommand(section.commands[0]);
    told.map(|told| told.get_arguments().filter(is_field).collect()).unwrap_or_default()
}

/// Reads the command line, with what a file says behind it.
pub(crate) fn parse(args: Vec<OsString>) -> Result<Cli, Failure> {
    let mut command = Cli::command();
    // Whether a file counts is for the command line to say, so it is read twice; its errors are for the second time.
    if let Ok(first) = Cli::command().ignore_errors(true).try_get_matches_from(&args)
        && first.subcommand_name().is_some_and(is_told)
    {
        let named = first.get_one::<PathBuf>("config").cloned();
        if let Some(file) = File::find(named)? {
            command = file.apply(command);
        }
    }
    let matches = command.try_get_matches_from(args).unwrap_or_else(|error| error.exit());
    Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()))
}

/// What a file says.
#[derive(Debug)]
struct File {
    path: PathBuf,
    settings: Vec<Setting>,
}

/// A field of a file with its value, which may be a list.
#[derive(Debug)]
struct Setting {
    section: &'static str,
    field: String,
    values: Vec<String>,
    line: usize,
}

/// Something that is wrong with a file.
#[derive(Debug, Serialize)]
struct Problem {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(field) = &self.field {
            write!(f, "{field} ")?;
        }
        f.write_str(&self.message)
    }
}

impl File {
    /// The file that counts: the one that is named, or the first that is there.
    fn path(named: Option<PathBuf>) -> Option<PathBuf> {
        named.or_else(|| PLACES.into_iter().map(PathBuf::from).find(|path| path.exists()))
    }

    fn find(named: Option<PathBuf>) -> Result<Option<File>, Failure> {
        let Some(path) = File::path(named) else { return Ok(None) };
        let text = read(&path)?;
        File::read(&path, &text).map(Some).map_err(|problems| wrong(&path, &problems))
    }

    /// Reads a file, and says everything that is wrong with it.
    fn read(path: &Path, text: &str) -> Result<File, Vec<Problem>> {
        let line = |at: usize| Some(1 + text[..at.min(text.len())].matches('\n').count());
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().and_then(|span| line(span.start));
            vec![Problem { line, field: None, message: error.message().into() }]
        })?;
        let command = Cli::command();
        let (mut settings, mut problems) = (Vec::new(), Vec::new());
        for (name, value) in table.get_ref() {
            let mut problem = |at: usize, field: &str, message: String| {
                problems.push(Problem { line: line(at), field: Some(field.into()), message });
            };
            let at = name.span().start;
            let Some(section) = SECTIONS.iter().find(|section| section.name == name.get_ref()) else {
                let sections = SECTIONS.map(|section| section.name);
                let message = match value.get_ref().is_table() {
                    true => format!("is no section; {}", instead(name.get_ref(), &sections)),
                    false => format!("stands in no section; {}", hint(&command, None, name.get_ref())),
                };
                problem(at, name.get_ref(), message);
                continue;
            };
            let Some(given) = value.get_ref().as_table() else {
                problem(at, section.name, format!("is a section: write [{}]", section.name));
                continue;
            };
            let known = fields(&command, section);
            for (field, value) in given {
                let at = field.span().start;
                let full = format!("{}.{}", section.name, field.get_ref());
                let Some(arg) = known.iter().find(|arg| arg.get_id() == field.get_ref().as_ref()) else {
                    problem(
                        at,
                        &full,
                        format!("is no setting; {}", hint(&command, Some(section), field.get_ref())),
                    );
                    continue;
                };
                match values(arg, value).and_then(|values| allowed(arg, &values).map(|()| values)) {
                    Ok(values) => settings.push(Setting {
                        section: section.name,
                        field: field.get_ref().to_string(),
                        values,
                        line: line(at).unwrap_or_default(),
                    }),
                    Err(message) => problem(at, &full, message),
                }
            }
        }
        problems.sort_by_key(|problem| problem.line);
        if problems.is_empty() { Ok(File { path: path.into(), settings }) } else { Err(problems) }
    }

    /// The command line with what the file says as its defaults.
    fn apply(&self, mut command: Command) -> Command {
        for setting in &self.settings {
            let Some(section) = SECTIONS.iter().find(|section| section.name == setting.section) else {
                continue;
            };
            for told in section.commands {
                // All of them, so that positions stay as they are.
                command = command.mut_subcommand(told, |told| with_default(told, setting));
            }
        }
        command
    }

    /// Where a setting stands.
    fn place(&self, section: &str, field: &str) -> Option<String> {
        let is = |setting: &&Setting| setting.section == section && setting.field == field;
        self.settings.iter().find(is).map(|setting| format!("{}:{}", self.path.display(), setting.line))
    }
}

/// A command, and those below it, with what a setting says as a default.
fn with_default(command: Command, setting: &Setting) -> Command {
    let command = command.mut_args(|arg| match *arg.get_id() == setting.field.as_str() {
        true => arg.required(false).default_values(setting.values.clone()),
        false => arg,
    });
    command.mut_subcommands(|below| with_default(below, setting))
}

/// Reads a file's text, and the command line with it.
pub(crate) fn fuzz(text: &str) {
    match File::read(Path::new("fuzz.toml"), text) {
        Ok(file) => {
            let command = file.apply(Cli::command());
            drop(command.try_get_matches_from(["evenhand", "serve"]));
            drop(disagreement(&file).map(|problem| problem.to_string()));
        }
        Err(problems) => drop(wrong(Path::new("fuzz.toml"), &problems)),
    }
}

fn read(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path)
        .map_err(|error| Failure { text: format!("cannot read {}: {error}", path.display()), exit: 2 })
}

fn wrong(path: &Path, problems: &[Problem]) -> Failure {
    let lines: Vec<String> =
        problems.iter().map(|problem| format!("{}: {problem}", path.display())).collect();
    Failure { text: lines.join("\nevenhand: "), exit: 2 }
}

/// What was meant, perhaps.
fn instead(name: &str, known: &[&str]) -> String {
    let alike = |other: &&&str| strsim::jaro_winkler(name, other) > 0.8;
    let best = known
        .iter()
        .filter(alike)
        .max_by(|a, b| strsim::jaro_winkler(name, a).total_cmp(&strsim::jaro_winkler(name, b)));
    match best {
        Some(best) => format!("did you mean {best}?"),
        None => format!("there are {}", known.join(", ")),
    }
}

/// The same of a field, which may also be that of another section.
fn hint(command: &Command, section: Option<&Section>, name: &str) -> String {
    let name = name.replace('-', "_");
    let names = |section: &Section| -> Vec<&str> {
        fields(command, section).iter().map(|arg| arg.get_id().as_str()).collect()
    };
    let other = SECTIONS.iter().find(|other| names(other).contains(&name.as_str()));
    match (other, section) {
        (Some(other), _) if section.is_none_or(|section| section.name != other.name) => {
            format!("it belongs into [{}]", other.name)
        }
        (_, Some(section)) => instead(&name, &names(section)),
        (_, None) => {
            format!("there are {}", SECTIONS.map(|section| format!("[{}]", section.name)).join(", "))
        }
    }
}

/// A value as the command line would have it.
fn values(arg: &Arg, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, String> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => Ok(number.as_str().into()),
        DeValue::Float(number) => Ok(number.as_str().into()),
        DeValue::Boolean(is) => Ok(is.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            Err(format!("must be a text or a number, not a {}", value.type_str()))
        }
    };
    let many = arg.get_num_args().is_some_and(|number| number.max_values() > 1)
        || matches!(arg.get_action(), clap::ArgAction::Append);
    match (value.get_ref().as_array(), many) {
        (Some(values), true) => values.iter().map(|value| one(value.get_ref())).collect(),
        (Some(_), false) => Err("must be one value, not a list".into()),
        (None, true) => Err("must be a list, such as [\"one\", \"two\"]".into()),
        (None, false) => one(value.get_ref()).map(|value| vec![value]),
    }
}

/// Whether the command line would take these values.
fn allowed(arg: &Arg, values: &[String]) -> Result<(), String> {
    if values.is_empty() {
        return Err("must not be empty".into());
    }
    let arg = arg.clone().required(false).last(false);
    let words: Vec<String> = match arg.get_long() {
        Some(long) => values.iter().map(|value| format!("--{long}={value}")).collect(),
        None => std::iter::once("--".into()).chain(values.iter().cloned()).collect(),
    };
    let read = Command::new("evenhand").no_binary_name(true).arg(arg).try_get_matches_from(words);
    read.map(drop).map_err(|error| {
        let text = error.render().to_string();
        let said: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
        let said = said.join(" ");
        // "invalid value 'soon' for '--grace <TIME>': why" is about a flag; this is about the field.
        match said.split_once(">': ").or_else(|| said.split_once(">' ")) {
            Some((_, why)) => format!("cannot be {}: {why}", values.join(" ")),
            None => said,
        }
    })
}

/// What to do with settings.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file: say everything that is wrong with it
    ///
    /// Ends with 0 if it is good, with 2 if not.
    #[command(after_help = "\
Examples:
  evenhand config check
  evenhand config check /etc/evenhand/evenhand.toml")]
    Check(CheckArgs),
    /// Show every setting that counts here, and where it comes from
    ///
    /// Flags go before the environment, the environment before the file, the file before the default.
    #[command(after_help = "\
Examples:
  evenhand config show
  evenhand config show --json | jq -r '.settings[] | select(.from != \"default\") | .field'")]
    Show(ShowArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct CheckArgs {
    /// The file; the one that counts here, if nobody says
    file: Option<PathBuf>,
    /// Print JSON for programs instead of text for people
    #[arg(long)]
    json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ShowArgs {
    /// Print JSON for programs instead of text for people
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: ConfigCommand, named: Option<PathBuf>) -> Done {
    match command {
        ConfigCommand::Check(args) => check(args, named),
        ConfigCommand::Show(args) => show(&args, named),
    }
}

#[derive(Serialize)]
struct Checked<'a> {
    file: &'a Path,
    good: bool,
    problems: &'a [Problem],
}

fn check(args: CheckArgs, named: Option<PathBuf>) -> Done {
    let Some(path) = File::path(args.file.or(named)) else {
        let text = format!("there is no configuration file; looked for {}", PLACES.join(" and "));
        return Err(Failure { text, exit: 3 });
    };
    let (count, problems) = match File::read(&path, &read(&path)?) {
        Ok(file) => (file.settings.len(), disagreement(&file).into_iter().collect()),
        Err(problems) => (0, problems),
    };
    if args.json {
        print_json(&Checked { file: &path, good: problems.is_empty(), problems: &problems })?;
    } else if problems.is_empty() {
        print(format!("{} is good: {}\n", path.display(), of(count as u64, "setting")))?;
    } else {
        for problem in &problems {
            say(format!("{}: {problem}", path.display()))?;
        }
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// Whether values that are good each by itself do not go together.
fn disagreement(file: &File) -> Option<Problem> {
    let problem = |message: String| Problem { line: None, field: None, message };
    let told = match file.apply(Cli::command()).try_get_matches_from(["evenhand", "serve"]) {
        Ok(matches) => matches.subcommand_matches("serve").cloned()?,
        Err(error) => return Some(problem(error.to_string().trim_end().into())),
    };
    let args = serve::Args::from_arg_matches(&told).ok()?;
    args.check().err().map(|failure| problem(failure.text))
}

/// A setting as it counts.
#[derive(Debug, Serialize)]
struct Effective {
    section: &'static str,
    field: String,
    /// None: nobody says, and the command finds one itself.
    value: Option<String>,
    from: From,
    /// The variable, or the file and its line.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum From {
    Environment,
    File,
    Default,
}

#[derive(Serialize)]
struct Shown<'a> {
    file: Option<&'a Path>,
    settings: &'a [Effective],
}

fn show(args: &ShowArgs, named: Option<PathBuf>) -> Done {
    let file = File::find(named)?;
    let settings = effective(file.as_ref())?;
    let path = file.as_ref().map(|file| file.path.as_path());
    if args.json {
        print_json(&Shown { file: path, settings: &settings })?;
        return Ok(ExitCode::SUCCESS);
    }
    match path {
        Some(path) => print(format!("file: {}\n\n", path.display()))?,
        None => print(format!("file: none; looked for {}\n\n", PLACES.join(" and ")))?,
    }
    let mut table =
        Table::new(vec![column("section", 3), column("field", 0), column("value", 1), column("from", 2)]);
    for setting in &settings {
        let look = if setting.from == From::Default { Look::Dim } else { Look::Plain };
        let from = setting.place.clone().unwrap_or_else(|| "default".into());
        let value = setting.value.as_deref().unwrap_or("-");
        let cells = [setting.section, &setting.field, value, &from];
        table.row(cells.map(|text| Cell::new(text, look)).into());
    }
    print(table.for_output())?;
    Ok(ExitCode::SUCCESS)
}

/// Every setting, as the command of its section would have it if it had no flags.
fn effective(file: Option<&File>) -> Result<Vec<Effective>, Failure> {
    let mut settings = Vec::new();
    for section in &SECTIONS {
        let mut command = Cli::command();
        if let Some(file) = file {
            command = file.apply(command);
        }
        let name = section.commands[0];
        let command = command.mut_subcommand(name, |told| told.mut_args(|arg| arg.required(false)));
        let ids: Vec<(String, Option<String>)> = fields(&command, section)
            .into_iter()
            .map(|arg| {
                (arg.get_id().to_string(), arg.get_env().map(|env| env.to_string_lossy().into_owned()))
            })
            .collect();
        let matches = command.try_get_matches_from(["evenhand", name]);
        let matches = matches.map_err(|error| {
            let text = error.to_string();
            Failure { text: text.trim_start_matches("error: ").trim_end().into(), exit: 2 }
        })?;
        let Some(matches) = matches.subcommand_matches(name) else { continue };
        for (field, variable) in ids {
            let values = matches.get_raw(&field).map(|values| {
                values.map(|value| value.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
            });
            let place = file.and_then(|file| file.place(section.name, &field));
            let (from, place) = match matches.value_source(&field) {
                Some(ValueSource::EnvVariable) => (From::Environment, variable),
                _ if place.is_some() => (From::File, place),
                _ => (From::Default, None),
            };
            settings.push(Effective { section: section.name, field, value: values, from, place });
        }
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn problems(text: &str, expected: &Expect) {
        let problems = File::read(Path::new("evenhand.toml"), text).map(drop).unwrap_err();
        expected.assert_eq(&wrong(Path::new("evenhand.toml"), &problems).text.replace("\nevenhand: ", "\n"));
    }

    #[test]
    fn every_command_that_asks_a_server_is_in_a_section() {
        fn asks(command: &Command) -> bool {
            command.get_arguments().any(|arg| arg.get_id() == "server" && arg.get_env().is_some())
                || command.get_subcommands().any(asks)
        }
        let command = Cli::command();
        // What is hidden is started by other commands, which say where.
        let asking = command.get_subcommands().filter(|command| !command.is_hide_set() && asks(command));
        let missing: Vec<&str> = asking.map(Command::get_name).filter(|name| !is_told(name)).collect();
        assert_eq!(missing, [""; 0]);
        let document = include_str!("../../../docs/configuration.md");
        let line = document.lines().find(|line| line.starts_with("[client]")).unwrap();
        for name in SECTIONS[0].commands {
            assert!(
                line.split([' ', ',']).any(|word| word == *name),
                "{name} is not in docs/configuration.md"
            );
        }
    }

    #[test]
    fn everything_that_is_wrong_with_a_file_is_said_with_its_line() {
        problems(
            "[serve]\nlisten = \"here\"\nhartbeat = \"1s\"\nlost_after = 60\ngrace = \"3s\"\nlog_format = \"xml\"\n\n[wroker]\nslots = 3\n",
            &expect![[r#"
                evenhand.toml: line 2: serve.listen cannot be here: invalid socket address syntax
                evenhand.toml: line 3: serve.hartbeat is no setting; did you mean heartbeat?
                evenhand.toml: line 4: serve.lost_after cannot be 60: "60" is no duration; write 250ms, 3s, 5m, 2h or 1d
                evenhand.toml: line 5: serve.grace is no setting; it belongs into [worker]
                evenhand.toml: line 6: serve.log_format cannot be xml: [possible values: text, json]
                evenhand.toml: line 8: wroker is no section; did you mean worker?"#]],
        );
        problems(
            "[worker]\nslots = 0\nqueues = \"render\"\nlost-after = 3\ncommand = []\nseat = [\"a\"]\n",
            &expect![[r#"
                evenhand.toml: line 2: worker.slots cannot be 0: 0 is not in 1..=10000
                evenhand.toml: line 3: worker.queues must be a list, such as ["one", "two"]
                evenhand.toml: line 4: worker.lost-after is no setting; it belongs into [serve]
                evenhand.toml: line 5: worker.command must not be empty
                evenhand.toml: line 6: worker.seat must be one value, not a list"#]],
        );
        problems(
            "server = \"http://a\"\nclient = 3\n",
            &expect![[r#"
                evenhand.toml: line 1: server stands in no section; it belongs into [client]
                evenhand.toml: line 2: client is a section: write [client]"#]],
        );
        problems(
            "[serve]\ndata = \"a\ndata = \"b\"\n",
            &expect![[r#"evenhand.toml: line 2: invalid basic string, expected `"`"#]],
        );
        problems("[serve]\ndata = \"a\"\ndata = \"b\"\n", &expect!["evenhand.toml: line 3: duplicate key"]);
    }

    fn told(file: &str, args: &[&str]) -> clap::ArgMatches {
        let file = File::read(Path::new("evenhand.toml"), file).unwrap();
        let args = std::iter::once(&"evenhand").chain(args);
        let (_, matches) =
            file.apply(Cli::command()).try_get_matches_from(args).unwrap().remove_subcommand().unwrap();
        matches
    }

    #[test]
    fn a_flag_goes_before_the_file_and_the_file_before_the_default() {
        // The environment is the process's, so it has its place among the tests that start one: tests/cli.rs.
        let file = "[serve]\nlost_after = \"30s\"\nfloor = 64\n[worker]\nqueues = [\"a=2\", \"b\"]\ncommand = [\"cat\", \"-n\"]\nslots = 3\n[client]\nserver = \"http://x:1\"\n";
        let raw = |matches: &clap::ArgMatches, id: &str| -> Vec<String> {
            matches.get_raw(id).unwrap().map(|value| value.to_string_lossy().into_owned()).collect()
        };
        let serve = told(file, &["serve", "--floor", "1"]);
        assert_eq!((raw(&serve, "lost_after"), raw(&serve, "floor")), (vec!["30s".into()], vec!["1".into()]));
        assert_eq!(raw(&serve, "absence"), ["5m"]);
        let worker = told(file, &["worker", "--slots", "4"]);
        assert_eq!(
            (raw(&worker, "queues"), raw(&worker, "slots")),
            (vec!["a=2".into(), "b".into()], vec!["4".into()])
        );
        assert_eq!(raw(&worker, "command"), ["cat", "-n"]);
        assert_eq!(raw(&told(file, &["worker", "c", "--", "true"]), "queues"), ["c"]);
        for command in ["status", "queues", "workers", "list", "top"] {
            assert_eq!(raw(&told(file, &[command]), "server"), ["http://x:1"], "{command}");
        }
        assert_eq!(raw(&told("[serve]\ndata = \"d\"\n", &["dev"]), "data"), ["d"]);
        // A part of a worker's settings is enough.
        assert_eq!(raw(&told("[worker]\nqueues = [\"a\"]\n", &["worker", "--", "cat"]), "queues"), ["a"]);
        assert_eq!(raw(&told("[worker]\ncommand = [\"cat\"]\n", &["worker", "a"]), "command"), ["cat"]);
    }

    #[test]
    fn values_that_do_not_go_together_are_found() {
        let file = File::read(Path::new("f"), "[serve]\nheartbeat = \"1m\"\n").unwrap();
        assert!(disagreement(&file).is_some_and(|problem| problem.message.contains("unhealthy")));
        assert!(disagreement(&File::read(Path::new("f"), "").unwrap()).is_none());
    }

    #[test]
    fn every_setting_is_in_the_document() {
        let document = include_str!("../../../docs/configuration.md");
        let command = Cli::command();
        for section in &SECTIONS {
            for arg in fields(&command, section) {
                let variable = arg.get_env().map_or("", |env| env.to_str().unwrap_or_default());
                let flag = arg.get_long().map_or_else(String::new, |long| format!("`--{long}"));
                let default: Vec<_> =
                    arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
                let row = document
                    .lines()
                    .find(|line| line.starts_with(&format!("| `{}.{}` ", section.name, arg.get_id())));
                let row =
                    row.unwrap_or_else(|| panic!("{}.{} is not in the document", section.name, arg.get_id()));
                assert!(
                    row.contains(variable) && row.contains(&flag) && row.contains(&default.join(" ")),
                    "{row}"
                );
            }
        }
    }
}
