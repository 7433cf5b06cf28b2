//! A matrix written by many threads: each task owns a rectangle of it, and no two rectangles meet.

#![allow(unsafe_code, reason = "threads write disjoint parts of one slice")]

use std::{marker::PhantomData, ops::Range};

use crate::pool::Pool;

/// A rectangle of a row-major matrix, owned by one task.
pub(crate) struct Tile<'a, T> {
    base: *mut T,
    width: usize,
    /// Rows of the matrix.
    pub(crate) rows: Range<usize>,
    /// Columns of the matrix.
    pub(crate) cols: Range<usize>,
    _matrix: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The tile's part of a row of the matrix.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row), "row {row} of a tile of {:?}", self.rows);
        // SAFETY: rows and columns of the tile lie inside the matrix, which `for_each_tile` holds mutably for as long as
        // any tile lives; tiles of one matrix are disjoint; `&mut self` keeps two rows from being held at once.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.add(row * self.width + self.cols.start), self.cols.len())
        }
    }
}

struct SendPtr<T>(*mut T);
// SAFETY: the pointer is only used to make disjoint tiles, and T may move between threads.
unsafe impl<T: Send> Sync for SendPtr<T> {}

/// How the rows of a matrix are dealt out.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// All of them in one group.
    All(usize),
    /// Each a group of its own.
    Each(usize),
    /// Group `g` is the rows `groups[g]..groups[g + 1]`.
    Groups(&'a [usize]),
}

impl Rows<'_> {
    fn n_groups(self) -> usize {
        match self {
            Rows::All(_) => 1,
            Rows::Each(n) => n,
            Rows::Groups(groups) => groups.len().saturating_sub(1),
        }
    }

    fn n_rows(self) -> usize {
        match self {
            Rows::All(n) | Rows::Each(n) => n,
            Rows::Groups(groups) => groups.last().copied().unwrap_or(0),
        }
    }

    fn group(self, g: usize) -> Range<usize> {
        match self {
            Rows::All(n) => 0..n,
            Rows::Each(_) => g..g + 1,
            Rows::Groups(groups) => groups[g]..groups[g + 1],
        }
    }
}

/// Calls `f(group, tile)` for each tile of `matrix`, whose rows are `width` long: each group of rows is cut into tiles of
/// `tile_cols` columns.
pub(crate) fn for_each_tile<T: Send>(
    pool: &Pool,
    matrix: &mut [T],
    width: usize,
    rows: Rows<'_>,
    tile_cols: usize,
    f: impl Fn(usize, Tile<'_, T>) + Sync,
) {
    if let Rows::Groups(groups) = rows {
        assert!(groups.is_sorted(), "groups are in order and so disjoint");
    }
    assert!(rows.n_rows() * width <= matrix.len(), "groups lie in the matrix");
    let n_tiles = width.div_ceil(tile_cols);
    let base = SendPtr(matrix.as_mut_ptr());
    let base = &base;
    pool.run(rows.n_groups() * n_tiles, &|_, task| {
        let (group, tile) = (task / n_tiles, task % n_tiles);
        let cols = tile * tile_cols..width.min((tile + 1) * tile_cols);
        f(group, Tile { base: base.0, width, rows: rows.group(group), cols, _matrix: PhantomData });
    });
}

/// Columns of a tile, so that every worker finds several tasks and a task stays worth its start.
pub(crate) fn tile_cols(pool: &Pool, width: usize, n_groups: usize) -> usize {
    (width * n_groups / (8 * pool.n_workers())).next_multiple_of(8).clamp(8, MAX_TILE_COLS)
}

/// Most columns that [`tile_cols`] gives: half a megabyte of bf16 weights at 2,048 columns, which hides the cold start of a
/// task's streams (16 columns lose a tenth of the bandwidth).
pub(crate) const MAX_TILE_COLS: usize = 128;

/// Calls `f(row, values)` for each row of `matrix`, on the caller alone where there is little to do.
pub(crate) fn for_each_row<T: Send>(
    pool: &Pool,
    matrix: &mut [T],
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    const WORTH_WAKING: usize = 1 << 17;
    if size_of_val(matrix) < WORTH_WAKING {
        return matrix.chunks_exact_mut(width).enumerate().for_each(|(row, values)| f(row, values));
    }
    let rows = Rows::Each(matrix.len() / width);
    for_each_tile(pool, matrix, width, rows, width, |row, mut tile| f(row, tile.row(row)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_matrix_once() {
        let pool = Pool::new(Some(2)).unwrap();
        for (groups, width, tile_cols) in
            [(vec![0, 3, 3, 7], 10, 4), (vec![0, 1], 1, 8), (vec![0], 5, 2), (vec![], 5, 2)]
        {
            let rows = groups.last().copied().unwrap_or(0);
            let mut matrix = vec![0_u32; rows * width];
            for_each_tile(&pool, &mut matrix, width, Rows::Groups(&groups), tile_cols, |group, mut tile| {
                assert_eq!(tile.rows, groups[group]..groups[group + 1]);
                for row in tile.rows.clone() {
                    tile.row(row).iter_mut().for_each(|v| *v += 1);
                }
            });
            assert!(matrix.iter().all(|&v| v == 1));
        }
        let mut matrix = vec![0_u32; 1 << 17];
        for_each_row(&pool, &mut matrix, 1 << 9, |row, values| values.fill(row as u32));
        assert!(matrix.iter().enumerate().all(|(i, &v)| v as usize == i >> 9));
    }
}
