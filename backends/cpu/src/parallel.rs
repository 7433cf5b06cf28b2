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
        // SAFETY: rows and columns of the tile lie inside the matrix, which its `Cut` holds mutably for as long as any tile
        // lives; tiles of one matrix are disjoint; `&mut self` keeps two rows from being held at once.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.add(row * self.width + self.cols.start), self.cols.len())
        }
    }
}

/// How the rows of a matrix are dealt out.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// All of them in one group.
    All(usize),
    /// Each a group of its own.
    Each(usize),
    /// Group `g` is the rows `groups[g]..groups[g + 1]`.
    Groups(&'a [usize]),
    /// Each span is a group, in any order; no two of them meet.
    Spans(&'a [Range<usize>]),
}

impl Rows<'_> {
    fn n_groups(self) -> usize {
        match self {
            Rows::All(_) => 1,
            Rows::Each(n) => n,
            Rows::Groups(groups) => groups.len().saturating_sub(1),
            Rows::Spans(spans) => spans.len(),
        }
    }

    fn n_rows(self) -> usize {
        match self {
            Rows::All(n) | Rows::Each(n) => n,
            Rows::Groups(groups) => groups.last().copied().unwrap_or(0),
            Rows::Spans(spans) => spans.iter().map(|span| span.end).max().unwrap_or(0),
        }
    }

    fn group(self, g: usize) -> Range<usize> {
        match self {
            Rows::All(n) => 0..n,
            Rows::Each(_) => g..g + 1,
            Rows::Groups(groups) => groups[g]..groups[g + 1],
            Rows::Spans(spans) => spans[g].clone(),
        }
    }

    fn are_disjoint(self) -> bool {
        match self {
            Rows::All(_) | Rows::Each(_) => true,
            Rows::Groups(groups) => groups.is_sorted(),
            Rows::Spans(spans) => spans
                .iter()
                .enumerate()
                .all(|(i, a)| spans[i + 1..].iter().all(|b| a.end <= b.start || b.end <= a.start)),
        }
    }
}

/// A matrix about to be dealt out: each group of rows is cut into tiles of `tile_cols` columns.
pub(crate) struct Cut<'a, T> {
    base: *mut T,
    width: usize,
    rows: Rows<'a>,
    tile_cols: usize,
    _matrix: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only used to make disjoint tiles, and T may move between threads.
unsafe impl<T: Send> Sync for Cut<'_, T> {}

impl<'a, T> Cut<'a, T> {
    /// Cuts `matrix`, whose rows are `width` long. Asserts that the groups lie in it and do not meet.
    pub(crate) fn new(matrix: &'a mut [T], width: usize, rows: Rows<'a>, tile_cols: usize) -> Self {
        assert!(rows.are_disjoint(), "groups that do not meet");
        assert!(rows.n_rows() * width <= matrix.len(), "groups lie in the matrix");
        Cut { base: matrix.as_mut_ptr(), width, rows, tile_cols, _matrix: PhantomData }
    }

    fn n_tiles(&self) -> usize {
        self.width.div_ceil(self.tile_cols)
    }

    /// Group and tile of a task, which nobody else asks for while the tile lives.
    fn tile(&self, task: usize) -> (usize, Tile<'_, T>) {
        let (group, tile) = (task / self.n_tiles(), task % self.n_tiles());
        let cols = tile * self.tile_cols..self.width.min((tile + 1) * self.tile_cols);
        let (base, width, rows) = (self.base, self.width, self.rows.group(group));
        (group, Tile { base, width, rows, cols, _matrix: PhantomData })
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
    let cut = Cut::new(matrix, width, rows, tile_cols);
    pool.run(rows.n_groups() * cut.n_tiles(), &|_, task| {
        let (group, tile) = cut.tile(task);
        f(group, tile);
    });
}

/// Calls `f(group, tile, tile)` with the tiles that have the same place in two matrices. Asserts that they are cut into as many.
pub(crate) fn for_each_tile_pair<A: Send, B: Send>(
    pool: &Pool,
    a: &Cut<'_, A>,
    b: &Cut<'_, B>,
    f: impl Fn(usize, Tile<'_, A>, Tile<'_, B>) + Sync,
) {
    let (n_groups, n_tiles) = (a.rows.n_groups(), a.n_tiles());
    assert_eq!((n_groups, n_tiles), (b.rows.n_groups(), b.n_tiles()), "tiles in pairs");
    pool.run(n_groups * n_tiles, &|_, task| {
        let (group, first) = a.tile(task);
        f(group, first, b.tile(task).1);
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
    use crate::pool::SPIN;

    #[test]
    fn tiles_cover_the_matrix_once() {
        let pool = Pool::new(Some(2), SPIN).unwrap();
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

    #[test]
    fn tiles_in_pairs_have_the_same_place() {
        let pool = Pool::new(Some(2), SPIN).unwrap();
        let (mut rows, mut slots) = (vec![0_u32; 7 * 6], vec![0_u32; 4 * 2]);
        // Two spans with a row between them; their slots are in another order.
        let (spans, places) = ([0..3, 4..7, 7..7], [2..3, 0..1, 0..0]);
        let a = Cut::new(&mut rows, 6, Rows::Spans(&spans), 3);
        let b = Cut::new(&mut slots, 2, Rows::Spans(&places), 1);
        for_each_tile_pair(&pool, &a, &b, |group, mut a, mut b| {
            for row in a.rows.clone() {
                a.row(row).fill(1 + group as u32);
            }
            for row in b.rows.clone() {
                b.row(row)[0] += 10 * (1 + group as u32) + b.cols.start as u32;
            }
        });
        assert_eq!(rows.chunks(6).map(|row| row[0]).collect::<Vec<_>>(), [1, 1, 1, 0, 2, 2, 2]);
        assert!(rows.chunks(6).all(|row| row.iter().all(|v| *v == row[0])));
        assert_eq!(slots, [20, 21, 0, 0, 10, 11, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "groups that do not meet")]
    fn spans_that_meet_are_refused() {
        Cut::new(&mut [0; 4], 1, Rows::Spans(&[0..2, 1..3]), 1);
    }
}
