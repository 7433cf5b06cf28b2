//! A table of measurements: aligned for people, CSV and JSON for programs. Values are in base units (seconds, bytes, shares
//! of one) everywhere but in what people read.

use serde_json::{Map, Value};

/// A column.
pub(super) struct Column {
    /// Name for programs.
    key: &'static str,
    /// Name for people.
    head: &'static str,
    /// What a value is multiplied with for people.
    scale: f64,
    /// Digits behind the point, for people.
    decimals: usize,
}

/// A column of this name for programs, and this head, scale and number of decimals for people.
pub(super) const fn column(key: &'static str, head: &'static str, scale: f64, decimals: usize) -> Column {
    Column { key, head, scale, decimals }
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    /// A name.
    Text(String),
    /// A measurement or a count.
    Number(f64),
    /// Does not apply.
    Empty,
}

impl From<f64> for Cell {
    fn from(value: f64) -> Self {
        Cell::Number(value)
    }
}

impl From<usize> for Cell {
    fn from(value: usize) -> Self {
        Cell::Number(value as f64)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Cell::Text(text.into())
    }
}

impl Cell {
    fn for_people(&self, column: &Column) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Number(value) => format!("{:.*}", column.decimals, value * column.scale),
            Cell::Empty => "-".into(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Cell::Text(text) => text.as_str().into(),
            Cell::Number(value) if value.fract() == 0.0 && value.abs() < 2_f64.powi(53) => {
                (*value as i64).into()
            }
            Cell::Number(value) => (*value).into(),
            Cell::Empty => Value::Null,
        }
    }

    fn csv(&self) -> String {
        match self {
            Cell::Text(text) if text.contains([',', '"', '\n']) => {
                format!("\"{}\"", text.replace('"', "\"\""))
            }
            Cell::Text(text) => text.clone(),
            Cell::Number(_) => self.json().to_string(),
            Cell::Empty => String::new(),
        }
    }
}

/// Rows under columns.
pub(super) struct Table {
    columns: &'static [Column],
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// No rows yet.
    pub(super) fn new(columns: &'static [Column]) -> Self {
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row with a cell for each column.
    pub(super) fn push<const N: usize>(&mut self, row: [Cell; N]) {
        assert_eq!(N, self.columns.len(), "a cell for each column");
        self.rows.push(row.into());
    }

    /// Aligned text: names to the left, numbers to the right.
    pub(super) fn text(&self) -> String {
        let heads = self.columns.iter().map(|column| column.head.to_owned()).collect();
        let cells = |row: &Vec<Cell>| {
            row.iter().zip(self.columns).map(|(cell, column)| cell.for_people(column)).collect()
        };
        let lines: Vec<Vec<String>> = [heads].into_iter().chain(self.rows.iter().map(cells)).collect();
        let width = |i: usize| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let is_text = |i: usize| self.rows.iter().all(|row| matches!(row[i], Cell::Text(_)));
        let line = |line: &Vec<String>| {
            let mut text = String::new();
            for (i, cell) in line.iter().enumerate() {
                let width = widths[i];
                text += &if is_text(i) { format!("{cell:<width$}  ") } else { format!("{cell:>width$}  ") };
            }
            text.trim_end().to_owned()
        };
        lines.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// RFC 4180 with a header.
    pub(super) fn csv(&self) -> String {
        let header = self.columns.iter().map(|column| column.key.to_owned()).collect::<Vec<_>>();
        let rows = self.rows.iter().map(|row| row.iter().map(Cell::csv).collect());
        [header].into_iter().chain(rows).map(|line: Vec<String>| line.join(",") + "\n").collect()
    }

    /// An array of objects.
    pub(super) fn json(&self) -> Value {
        let cells = |row: &Vec<Cell>| {
            row.iter().zip(self.columns).map(|(cell, c)| (c.key.into(), cell.json())).collect()
        };
        self.rows.iter().map(cells).collect::<Vec<Map<_, _>>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] =
        [column("op", "op", 1.0, 0), column("seconds", "ms", 1e3, 1), column("share", "share", 100.0, 0)];

    fn table() -> Table {
        let mut table = Table::new(&COLUMNS);
        table.push(["a".into(), 0.0125.into(), 0.5.into()]);
        table.push(["b, \"c\"".into(), 2.0.into(), Cell::Empty]);
        table
    }

    #[test]
    fn people_read_scaled_and_aligned_numbers() {
        assert_eq!(table().text(), "op          ms  share\na         12.5     50\nb, \"c\"  2000.0      -");
    }

    #[test]
    fn programs_read_base_units() {
        assert_eq!(table().csv(), "op,seconds,share\na,0.0125,0.5\n\"b, \"\"c\"\"\",2,\n");
        let json = serde_json::json!([
            { "op": "a", "seconds": 0.0125, "share": 0.5 }, { "op": "b, \"c\"", "seconds": 2, "share": null }
        ]);
        assert_eq!(table().json(), json);
    }
}
