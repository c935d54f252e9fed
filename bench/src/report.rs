//! Results for people (a table) and for programs (one JSON object per line).

/// A value in a report.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Some words.
    Text(String),
    /// A whole number.
    Count(u64),
    /// A number, and how many decimals of it mean something.
    Number(f64, usize),
    /// Yes or no.
    Is(bool),
    /// Not measured.
    None,
}

impl Value {
    pub(crate) fn text(text: impl Into<String>) -> Value {
        Value::Text(text.into())
    }

    fn for_people(&self) -> String {
        match self {
            Value::Text(text) => text.clone(),
            Value::Count(n) => thousands(&n.to_string()),
            Value::Number(n, decimals) => thousands(&format!("{n:.decimals$}")),
            Value::Is(true) => "yes".into(),
            Value::Is(false) => "NO".into(),
            Value::None => "-".into(),
        }
    }

    fn for_programs(&self) -> String {
        match self {
            Value::Text(text) => quoted(text),
            Value::Count(n) => n.to_string(),
            Value::Number(n, _) if !n.is_finite() => "null".into(),
            Value::Number(n, decimals) => format!("{n:.decimals$}"),
            Value::Is(is) => is.to_string(),
            Value::None => "null".into(),
        }
    }
}

/// One table. Each column has a name for programs and a heading for people.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    name: &'static str,
    title: String,
    columns: Vec<(&'static str, &'static str)>,
    rows: Vec<Vec<Value>>,
}

impl Report {
    /// A table without rows.
    pub(crate) fn new(name: &'static str, title: &str, columns: &[(&'static str, &'static str)]) -> Report {
        Report { name, title: title.into(), columns: columns.to_vec(), rows: Vec::new() }
    }

    /// One more row, with a value for each column.
    pub(crate) fn row(&mut self, values: Vec<Value>) {
        debug_assert_eq!(values.len(), self.columns.len());
        self.rows.push(values);
    }

    /// Prints it to stdout, if there is anything in it.
    pub(crate) fn print(&self, json: bool) {
        if self.rows.is_empty() {
            return;
        }
        print!("{}", if json { self.for_programs() } else { self.for_people() });
    }

    fn for_programs(&self) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let fields = self.columns.iter().zip(row);
            let fields =
                fields.map(|((name, _), value)| format!(",{}:{}", quoted(name), value.for_programs()));
            text += &format!("{{\"bench\":{}{}}}\n", quoted(self.name), fields.collect::<String>());
        }
        text
    }

    fn for_people(&self) -> String {
        let mut lines: Vec<Vec<String>> =
            vec![self.columns.iter().map(|(_, heading)| (*heading).into()).collect()];
        lines.extend(self.rows.iter().map(|row| row.iter().map(Value::for_people).collect()));
        let width =
            |n: usize| lines.iter().map(|line: &Vec<String>| line[n].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let words = |n: usize| self.rows.iter().any(|row| matches!(row[n], Value::Text(_)));
        let mut text = format!("\n{}\n", self.title);
        for line in &lines {
            let cells = line.iter().enumerate().map(|(n, cell)| {
                let width = widths[n];
                if words(n) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            let line: String = cells.collect::<Vec<_>>().join("   ");
            text += &format!("  {}\n", line.trim_end());
        }
        text
    }
}

/// What was aimed at, and what came of it.
#[derive(Debug)]
pub(crate) struct Aims(Report);

impl Aims {
    /// None yet.
    pub(crate) fn new(title: &str) -> Aims {
        let columns = [("what", "what"), ("aim", "aim"), ("measured", "measured"), ("reached", "reached")];
        Aims(Report::new("aim", title, &columns))
    }

    /// At least this much.
    pub(crate) fn at_least(&mut self, what: &str, aim: f64, measured: f64, decimals: usize) {
        self.push(what, aim, measured, decimals, measured >= aim);
    }

    /// At most this much.
    pub(crate) fn at_most(&mut self, what: &str, aim: f64, measured: f64, decimals: usize) {
        self.push(what, aim, measured, decimals, measured <= aim);
    }

    fn push(&mut self, what: &str, aim: f64, measured: f64, decimals: usize, reached: bool) {
        self.0.row(vec![
            Value::text(what),
            Value::Number(aim, 0),
            Value::Number(measured, decimals),
            Value::Is(reached),
        ]);
    }

    /// The table.
    pub(crate) fn report(self) -> Report {
        self.0
    }
}

/// Says on what machine the numbers were measured, without which they say nothing.
pub(crate) fn print_machine(json: bool) {
    let model = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let model = model.unwrap_or_else(|| "unknown processor".into());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if json {
        println!("{{\"bench\":\"machine\",\"processor\":{},\"processors\":{processors}}}", quoted(&model));
    } else {
        println!("Measured on one of {processors} processors of this kind: {model}");
    }
}

/// Commas between thousands.
fn thousands(number: &str) -> String {
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(w, f)| (w, Some(f)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut text = String::from(sign);
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    fraction.map_or(text.clone(), |fraction| format!("{text}.{fraction}"))
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted += &format!("\\u{:04x}", u32::from(c)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("b", "Title", &[("name", "name"), ("n", "number"), ("r", "ratio")]);
        report.row(vec![Value::text("a \"b\""), Value::Count(1_234_567), Value::Number(0.5, 2)]);
        report.row(vec![Value::text("c"), Value::Count(12), Value::None]);
        report
    }

    #[test]
    fn people_get_a_table() {
        let wanted = "\nTitle\n  name       number   ratio\n  a \"b\"   1,234,567    0.50\n  c              12       -\n";
        assert_eq!(report().for_people(), wanted);
    }

    #[test]
    fn programs_get_a_line_per_row() {
        let wanted = "{\"bench\":\"b\",\"name\":\"a \\\"b\\\"\",\"n\":1234567,\"r\":0.50}\n\
                      {\"bench\":\"b\",\"name\":\"c\",\"n\":12,\"r\":null}\n";
        assert_eq!(report().for_programs(), wanted);
    }

    #[test]
    fn thousands_are_parted() {
        let parted: Vec<String> = ["1", "123", "1234", "123456.75", "-1234567"].map(thousands).into();
        assert_eq!(parted, ["1", "123", "1,234", "123,456.75", "-1,234,567"]);
    }
}
