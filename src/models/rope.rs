//! Rotary position encodings: frequencies and tables, in f64 on the host, so that no device computes a sine.

use std::f64::consts::TAU;

use super::{ConfigError, ConfigFile};

/// How positions rotate queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Radians a position, `[rotary_dim / 2]`.
    pub frequencies: Vec<f64>,
    /// What cosine and sine are multiplied with (YaRN).
    pub scale: f64,
}

impl Rope {
    /// Reads `rope_theta` and `rope_scaling`, or `rope_parameters` which holds both in newer files.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field.
    pub fn from_config(config: &ConfigFile<'_>, rotary_dim: usize) -> Result<Self, ConfigError> {
        let (scaling, theta_of) = match config.object("rope_parameters", "rope_parameters.")? {
            Some(parameters) => (Some(parameters), parameters),
            None => (config.object("rope_scaling", "rope_scaling.")?, *config),
        };
        let theta = theta_of.optional_number("rope_theta", 1.0..=1e12)?.unwrap_or(10_000.0);
        let plain = Rope {
            frequencies: (0..rotary_dim / 2)
                .map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64))
                .collect(),
            scale: 1.0,
        };
        let Some(scaling) = scaling else { return Ok(plain) };
        let field = if scaling.has("rope_type") { "rope_type" } else { "type" };
        match scaling.has(field).then(|| scaling.text(field)).transpose()?.as_deref() {
            None | Some("default") => Ok(plain),
            Some("linear") => {
                let factor = scaling.number("factor", 1.0..=1e6)?;
                Ok(Rope { frequencies: plain.frequencies.iter().map(|f| f / factor).collect(), scale: 1.0 })
            }
            Some("llama3") => plain.llama3(&scaling),
            Some("yarn") => plain.yarn(config, &scaling, theta, rotary_dim),
            Some(_) => Err(scaling.error(field, "must be one of default, linear, llama3, yarn")),
        }
    }

    /// Long wavelengths are slowed down, short ones kept, those between blended (Llama 3.1).
    fn llama3(self, scaling: &ConfigFile<'_>) -> Result<Self, ConfigError> {
        let factor = scaling.number("factor", 1.0..=1e6)?;
        let low = scaling.number("low_freq_factor", 1e-6..=1e6)?;
        let high = scaling.number("high_freq_factor", 1e-6..=1e6)?;
        if high <= low {
            return Err(scaling
                .error("high_freq_factor", format!("is {high}; it must be above low_freq_factor, {low}")));
        }
        let original = scaling.number("original_max_position_embeddings", 1.0..=1e9)?;
        let slow = |f: &f64| {
            let turns = original * f / TAU;
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            f * keep + f / factor * (1.0 - keep)
        };
        Ok(Rope { frequencies: self.frequencies.iter().map(slow).collect(), scale: 1.0 })
    }

    /// YaRN: a ramp over dimensions from kept to interpolated frequencies, and hotter attention.
    fn yarn(
        self,
        config: &ConfigFile<'_>,
        scaling: &ConfigFile<'_>,
        theta: f64,
        rotary_dim: usize,
    ) -> Result<Self, ConfigError> {
        let factor = scaling.number("factor", 1.0..=1e6)?;
        let original = match scaling.optional_number("original_max_position_embeddings", 1.0..=1e9)? {
            Some(original) => original,
            None => config.number("max_position_embeddings", 1.0..=1e9)?,
        };
        let beta_fast = scaling.optional_number("beta_fast", 1e-6..=1e6)?.unwrap_or(32.0);
        let beta_slow = scaling.optional_number("beta_slow", 1e-6..=1e6)?.unwrap_or(1.0);
        let dim = |turns: f64| rotary_dim as f64 * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let truncate = scaling.flag("truncate", true)?;
        let (low, high) = (dim(beta_fast), dim(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let low = low.max(0.0);
        let high = high.min(rotary_dim as f64 - 1.0);
        let high = if high == low { high + 0.001 } else { high };
        let blend = |(i, f): (usize, &f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        };
        let mscale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let scale = match scaling.optional_number("attention_factor", 1e-6..=1e6)? {
            Some(scale) => scale,
            None => {
                let over = scaling.optional_number("mscale", 0.0..=1e3)?.unwrap_or(0.0);
                let under = scaling.optional_number("mscale_all_dim", 0.0..=1e3)?.unwrap_or(0.0);
                if over > 0.0 && under > 0.0 { mscale(over) / mscale(under) } else { mscale(1.0) }
            }
        };
        Ok(Rope { frequencies: self.frequencies.iter().enumerate().map(blend).collect(), scale })
    }

    /// Rotated width of a head.
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Cosine and sine, `[n_positions, rotary_dim / 2, 2]`.
    pub fn table(&self, n_positions: usize) -> Vec<f32> {
        let mut table = Vec::with_capacity(n_positions * self.rotary_dim());
        for position in 0..n_positions {
            for frequency in &self.frequencies {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                table.extend([(cos * self.scale) as f32, (sin * self.scale) as f32]);
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(json: serde_json::Value) -> Result<Rope, ConfigError> {
        let fields = json.as_object().unwrap().clone();
        Rope::from_config(&ConfigFile::new("config.json", &fields), 8)
    }

    #[test]
    fn plain_and_linear() {
        let plain = rope(serde_json::json!({ "rope_theta": 10000.0 })).unwrap();
        for (got, want) in plain.frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((got - want).abs() < 1e-12);
        }
        assert_eq!(&plain.table(1), &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        assert!((plain.table(3)[16] - 2.0_f32.cos()).abs() < 1e-7);
        let linear =
            rope(serde_json::json!({ "rope_scaling": { "type": "linear", "factor": 4.0 } })).unwrap();
        assert!((linear.frequencies[0] - 0.25).abs() < 1e-12);
        let newer =
            rope(serde_json::json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0 } }));
        assert_eq!(newer.unwrap(), plain);
    }

    #[test]
    fn yarn_keeps_the_fast_and_slows_the_slow() {
        let yarn = rope(serde_json::json!({ "rope_theta": 10000.0, "rope_scaling":
            { "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096 } }));
        let yarn = yarn.unwrap();
        assert!((yarn.frequencies[0] - 1.0).abs() < 1e-12);
        assert!((yarn.frequencies[3] - 0.00025).abs() < 1e-9);
        assert!((yarn.scale - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-12);
    }

    #[test]
    fn impossible_fields_are_refused() {
        for (json, field) in [
            (serde_json::json!({ "rope_theta": 0 }), "`rope_theta`"),
            (
                serde_json::json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }),
                "`rope_scaling.type`",
            ),
            (serde_json::json!({ "rope_scaling": { "rope_type": "yarn" } }), "`rope_scaling.factor`"),
            (serde_json::json!({ "rope_scaling": 3 }), "`rope_scaling`"),
        ] {
            let error = rope(json).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
