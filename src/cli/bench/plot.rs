//! Curves as an SVG picture, for a page with a white background: shares of one over shares of one, both drawn in per cent. It
//! knows nothing of what the shares are of.

use std::fmt::Write;

/// A picture of curves.
pub(super) struct Plot<'a> {
    pub(super) title: &'a str,
    /// One line below the title.
    pub(super) subtitle: &'a str,
    /// What the horizontal axis counts.
    pub(super) across: &'a str,
    /// What the vertical axis counts.
    pub(super) up: &'a str,
    /// The highest last.
    pub(super) curves: Vec<Curve<'a>>,
}

/// One line of it.
pub(super) struct Curve<'a> {
    /// Name in the legend.
    pub(super) name: &'a str,
    pub(super) stroke: Stroke,
    /// (across, up), shares of one, from left to right.
    pub(super) points: Vec<(f64, f64)>,
}

/// How a curve is drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stroke {
    /// As SVG has it.
    pub(super) colour: &'static str,
    pub(super) dashed: bool,
}

/// Size of the picture, and the margins around the axes: left, top, right, bottom.
const SIZE: [f64; 2] = [760.0, 480.0];
const MARGINS: [f64; 4] = [72.0, 84.0, 32.0, 64.0];
/// Per cent between two ticks.
const TICK: usize = 20;

const TEXT: &str = "#1f2430";
const FAINT_TEXT: &str = "#5c6370";
const AXIS: &str = "#9aa0aa";
const GRID: &str = "#e8eaee";

impl Plot<'_> {
    /// The picture, a whole file.
    pub(super) fn svg(&self) -> String {
        let ([width, height], [left, top, right, bottom]) = (SIZE, MARGINS);
        let (x_end, y_end) = (width - right, height - bottom);
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif" font-size="13" fill="{TEXT}">
<title>{title}</title>
<rect width="100%" height="100%" fill="white"/>
<text x="{left}" y="36" font-size="19" font-weight="600">{title}</text>
<text x="{left}" y="59" fill="{FAINT_TEXT}">{subtitle}</text>
"#,
            title = escaped(self.title),
            subtitle = escaped(self.subtitle),
        );
        let mut line = |text: String| svg += &(text + "\n");
        for tick in (0..=100).step_by(TICK) {
            let (x, y) = place((tick as f64 / 100.0, tick as f64 / 100.0));
            let colour = if tick == 0 { AXIS } else { GRID };
            line(format!(r#"<path d="M{left} {y:.1}H{x_end}" stroke="{colour}"/>"#));
            line(format!(r#"<path d="M{x:.1} {y_end}v5" stroke="{AXIS}"/>"#));
            let (tick_x, tick_y) = (left - 10.0, y + 4.5);
            line(format!(
                r#"<text x="{tick_x}" y="{tick_y:.1}" text-anchor="end" fill="{FAINT_TEXT}">{tick} %</text>"#
            ));
            let below = y_end + 21.0;
            line(format!(
                r#"<text x="{x:.1}" y="{below}" text-anchor="middle" fill="{FAINT_TEXT}">{tick} %</text>"#
            ));
        }
        let (middle_x, middle_y, below) = ((left + x_end) / 2.0, (top + y_end) / 2.0, height - 16.0);
        line(format!(
            r#"<text x="{middle_x}" y="{below}" text-anchor="middle">{}</text>"#,
            escaped(self.across)
        ));
        line(format!(
            r#"<text transform="translate(20 {middle_y}) rotate(-90)" text-anchor="middle">{}</text>"#,
            escaped(self.up)
        ));
        self.curves.iter().for_each(|curve| line(curve.svg()));
        // Curves that rise leave this corner free, and have the highest last.
        let (x, y) = (x_end - 168.0, y_end - 22.0 * self.curves.len() as f64);
        line(format!(r#"<path d="M{} {}H{x_end}V{}H{0}Z" fill="white"/>"#, x - 10.0, y - 14.0, y_end - 1.0));
        for (i, curve) in self.curves.iter().rev().enumerate() {
            line(curve.legend(x, y + 22.0 * i as f64 + 2.0));
        }
        svg + "</svg>\n"
    }
}

impl Curve<'_> {
    fn svg(&self) -> String {
        let places: Vec<(f64, f64)> = self.points.iter().copied().map(place).collect();
        let (mut path, mut dots) = (String::new(), String::new());
        for (i, (x, y)) in places.into_iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(path, "{command}{x:.1} {y:.1}");
            let _ = write!(dots, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.4"/>"#);
        }
        let Stroke { colour, .. } = self.stroke;
        format!(
            r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"{}/><g fill="{colour}" stroke="white" stroke-width="1.2">{dots}</g>"#,
            self.stroke.dashes()
        )
    }

    fn legend(&self, x: f64, y: f64) -> String {
        let (end, text, baseline) = (x + 28.0, x + 38.0, y + 4.5);
        format!(
            r#"<path d="M{x} {y}H{end}" stroke="{}" stroke-width="2.2"{}/><text x="{text}" y="{baseline}">{}</text>"#,
            self.stroke.colour,
            self.stroke.dashes(),
            escaped(self.name)
        )
    }
}

impl Stroke {
    fn dashes(self) -> &'static str {
        if self.dashed { r#" stroke-dasharray="7 4""# } else { "" }
    }
}

/// Where two shares lie in the picture.
fn place((across, up): (f64, f64)) -> (f64, f64) {
    let ([width, height], [left, top, right, bottom]) = (SIZE, MARGINS);
    (left + across * (width - left - right), height - bottom - up * (height - top - bottom))
}

/// Text as XML has it; what XML cannot have is left out.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars().filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')) {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_lie_between_the_axes() {
        assert_eq!(place((0.0, 0.0)), (72.0, 416.0));
        assert_eq!(place((1.0, 1.0)), (728.0, 84.0));
    }

    #[test]
    fn a_name_cannot_break_the_picture() {
        let stroke = Stroke { colour: "#000", dashed: true };
        let curve = Curve { name: "a<b>&\u{1}c", stroke, points: vec![(0.0, 0.5), (1.0, 1.0)] };
        let plot = Plot { title: "</title>", subtitle: "", across: "", up: "", curves: vec![curve] };
        let svg = plot.svg();
        assert!(svg.contains(">a&lt;b&gt;&amp;c<") && svg.contains("<title>&lt;/title&gt;</title>"), "{svg}");
        assert!(svg.contains(r#"<path d="M72.0 250.0L728.0 84.0" "#), "{svg}");
    }
}
