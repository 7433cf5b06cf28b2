//! The thread pool: one pinned thread a physical core, the calling thread among them as worker 0.
//!
//! Made for many short jobs in a row: workers spin for a while after a job and only then sleep, a job allocates nothing, and a worker that wakes too late misses the job instead of delaying it. The pool knows nothing of
//! what it runs.
//!
//! All coordination is one word, `gate`: how many workers are inside the job, whether it still admits workers, whether
//! the pool is ending, and the job's number. A worker enters by a compare-exchange on the whole word, so it can only
//! enter the job that it saw.

#![allow(unsafe_code)] // One block: workers read the job on the stack of the thread that waits for them.

use freetoken_backend::os;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for the next job before it sleeps: longer than the gap between two ops of a step.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// The same beside a device, which works between two route points: waking takes as long as an expert.
pub(crate) const SPIN_BESIDE: Duration = Duration::from_millis(1);
/// Looks at the gate between two looks at the clock.
const LOOKS: usize = 64;

/// `gate`, from the low bits: workers inside, then one bit each for open and ending, then the job's number.
const INSIDE: u64 = (1 << 16) - 1;
const OPEN: u64 = 1 << 16;
const ENDING: u64 = 1 << 17;
const NUMBER: u64 = 1 << 18;

/// A function of (worker, task), called once a task.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;
type Panic = Box<dyn Any + Send>;

thread_local! {
    /// The pool whose task this thread is running, and as which worker.
    static RUNNING: Cell<(*const Shared, usize)> = const { Cell::new((ptr::null(), 0)) };
}

/// A fixed set of threads that run one job at a time.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the thread that is worker 0.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    spin: Duration,
    gate: AtomicU64,
    /// The job that `gate` describes; read only by workers inside it.
    job: AtomicPtr<Job<'static>>,
    n_asleep: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// One call of [`Pool::run`], on the stack of its caller.
struct Job<'a> {
    task: &'a Task<'a>,
    n_tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Panic>>,
}

impl Pool {
    /// Starts `n_threads` workers that look for the next job for the time `spin` before they sleep, by default one for each physical core, counting the thread that will call
    /// [`run`](Self::run). Worker `i` is pinned to the `i`-th physical core; workers beyond the last core are not
    /// pinned, and the caller is left to pin itself, since threads that it starts later would inherit its place.
    ///
    /// # Errors
    /// The system's refusal to start a thread.
    pub(crate) fn new(n_threads: Option<usize>, spin: Duration) -> std::io::Result<Self> {
        let cores = os::physical_cores();
        let n_workers = n_threads.unwrap_or(cores.len()).clamp(1, INSIDE as usize);
        let mut pool = Self {
            shared: Arc::new(Shared {
                spin,
                gate: AtomicU64::default(),
                job: AtomicPtr::default(),
                n_asleep: AtomicUsize::default(),
                sleep: Mutex::default(),
                wake: Condvar::default(),
            }),
            threads: Vec::with_capacity(n_workers - 1),
            turn: Mutex::default(),
        };
        for worker in 1..n_workers {
            let (shared, core) = (Arc::clone(&pool.shared), cores.get(worker).copied());
            let body = move || {
                if let Some(core) = core {
                    os::pin_current_thread(core);
                }
                shared.work(worker);
            };
            pool.threads.push(std::thread::Builder::new().name(format!("cpu-{worker}")).spawn(body)?);
        }
        Ok(pool)
    }

    /// Workers, the caller included: every worker index is below it.
    pub(crate) fn n_workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `task(worker, index)` for every index below `n_tasks` and returns when all calls have returned. Idle
    /// workers take the next index; no two calls that run at the same time have the same worker.
    ///
    /// Callers on several threads take turns. Called from inside a task of the same pool, it runs the tasks one after
    /// the other as that task's worker.
    ///
    /// # Panics
    /// With the panic of a task, after all running tasks have ended; tasks not yet started are skipped.
    pub(crate) fn run(&self, n_tasks: usize, task: &Task<'_>) {
        let (running, worker) = RUNNING.get();
        if ptr::eq(running, &*self.shared) {
            return (0..n_tasks).for_each(|index| task(worker, index));
        }
        let _turn = lock(&self.turn);
        let job = Job { task, n_tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        if n_tasks <= 1 || self.threads.is_empty() {
            self.shared.take_tasks(&job, 0);
        } else {
            self.shared.open(&job);
            self.shared.take_tasks(&job, 0);
            self.shared.close();
        }
        let panic = lock(&job.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.gate.fetch_or(ENDING, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to learn from its result.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Admits workers to `job`. Every `open` is followed by [`close`](Self::close) before `job` ends.
    fn open(&self, job: &Job<'_>) {
        self.job.store(ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        // SeqCst here, at `n_asleep` and in `fall_asleep`: either the worker sees this job or we see the sleeper.
        let number = self.gate.load(Ordering::Relaxed) & !(NUMBER - 1);
        self.gate.store(number.wrapping_add(NUMBER) | OPEN, Ordering::SeqCst);
        if self.n_asleep.load(Ordering::SeqCst) > 0 {
            self.wake_sleepers();
        }
    }

    /// Admits no more workers and waits for those inside.
    fn close(&self) {
        let mut gate = self.gate.fetch_and(!OPEN, Ordering::Acquire);
        let mut looks = 0;
        while gate & INSIDE > 0 {
            looks += 1;
            // More workers than free cores: let the one we wait for have ours.
            if looks % (LOOKS * LOOKS) == 0 {
                std::thread::yield_now()
            } else {
                std::hint::spin_loop()
            }
            gate = self.gate.load(Ordering::Acquire);
        }
    }

    /// The body of a worker's thread.
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let gate = self.next_gate(seen);
            if gate & ENDING > 0 {
                return;
            }
            if self.gate.compare_exchange(gate, gate + 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                seen = gate / NUMBER;
                // SAFETY: we entered the open job `gate / NUMBER`, whose pointer was stored before it opened. Its owner
                // does not leave `close`, and so keeps the job and all it borrows alive, until `gate` counts us out.
                let job = unsafe { &*self.job.load(Ordering::Relaxed) };
                self.take_tasks(job, worker);
                self.gate.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Waits, first spinning and then asleep, for an open job other than `seen` or for the end of the pool.
    fn next_gate(&self, seen: u64) -> u64 {
        let news = || {
            let gate = self.gate.load(Ordering::SeqCst);
            (gate & ENDING > 0 || gate & OPEN > 0 && gate / NUMBER != seen).then_some(gate)
        };
        let start = Instant::now();
        while start.elapsed() < self.spin {
            for _ in 0..LOOKS {
                if let Some(gate) = news() {
                    return gate;
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = lock(&self.sleep);
        self.n_asleep.fetch_add(1, Ordering::SeqCst);
        loop {
            if let Some(gate) = news() {
                self.n_asleep.fetch_sub(1, Ordering::Relaxed);
                return gate;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wake_sleepers(&self) {
        // Whoever counted itself asleep holds this lock until it waits, so the notice cannot come in between.
        drop(lock(&self.sleep));
        self.wake.notify_all();
    }

    /// Runs tasks of `job` until none is left.
    fn take_tasks(&self, job: &Job<'_>, worker: usize) {
        let outer = RUNNING.replace((self, worker));
        let run = || {
            loop {
                let index = job.next.fetch_add(1, Ordering::Relaxed);
                if index >= job.n_tasks {
                    break;
                }
                (job.task)(worker, index);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            job.next.store(job.n_tasks, Ordering::Relaxed);
            match &mut *lock(&job.panic) {
                first @ None => *first = Some(panic),
                // Its destructor might panic here, where the job is still open.
                Some(_) => std::mem::forget(panic),
            }
        }
        RUNNING.set(outer);
    }
}

/// None of our locks guards a value that a panic could leave half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn sum(pool: &Pool, n_tasks: usize) -> usize {
        let sum = AtomicUsize::new(0);
        pool.run(n_tasks, &|worker, index| {
            assert!(worker < pool.n_workers());
            sum.fetch_add(index + 1, Ordering::Relaxed);
        });
        sum.into_inner()
    }

    #[test]
    fn every_task_runs_once() {
        for n_threads in [1, 2, 4] {
            let pool = Pool::new(Some(n_threads), SPIN).unwrap();
            assert_eq!(pool.n_workers(), n_threads);
            for n_tasks in [0, 1, 2, 3, 1000] {
                assert_eq!(sum(&pool, n_tasks), n_tasks * (n_tasks + 1) / 2);
            }
        }
        assert_eq!(Pool::new(None, SPIN).unwrap().n_workers(), os::physical_cores().len());
        assert_eq!(Pool::new(Some(0), SPIN).unwrap().n_workers(), 1);
    }

    #[test]
    fn other_workers_take_part() {
        let pool = Pool::new(Some(3), SPIN).unwrap();
        let present = AtomicUsize::new(0);
        pool.run(3, &|_, _| {
            present.fetch_add(1, Ordering::Relaxed);
            while present.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn many_small_jobs_awake_and_asleep() {
        let pool = Pool::new(Some(2), SPIN).unwrap();
        for round in 0..100_000 {
            assert_eq!(sum(&pool, 4), 10);
            if round % 1000 == 0 {
                std::thread::sleep(2 * SPIN);
            }
        }
    }

    #[test]
    fn a_worker_index_is_never_used_twice_at_a_time() {
        let pool = Pool::new(Some(4), SPIN).unwrap();
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        let count = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for n_tasks in (0..2000).map(|round| round % 7) {
                        pool.run(n_tasks, &|worker, _| {
                            assert!(!busy[worker].swap(true, Ordering::SeqCst));
                            count.fetch_add(1, Ordering::Relaxed);
                            assert!(busy[worker].swap(false, Ordering::SeqCst));
                        });
                    }
                });
            }
        });
        let expected: usize = (0..2000).map(|round| round % 7).sum();
        assert_eq!(count.into_inner(), 2 * expected);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(Some(2), SPIN).unwrap();
        for n_tasks in [1, 64] {
            let run = || pool.run(n_tasks, &|_, index| assert!(index != n_tasks / 2, "task {index} fails"));
            let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("task {} fails", n_tasks / 2)));
            assert_eq!(sum(&pool, 100), 5050);
        }
    }

    #[test]
    fn a_nested_job_runs_inline() {
        let (pool, other) = (Pool::new(Some(2), SPIN).unwrap(), Pool::new(Some(2), SPIN).unwrap());
        let count = AtomicUsize::new(0);
        pool.run(8, &|outer, _| {
            pool.run(5, &|inner, _| {
                assert_eq!(inner, outer);
                count.fetch_add(1, Ordering::Relaxed);
            });
            count.fetch_add(sum(&other, 3), Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 8 * (5 + 6));
    }

    #[test]
    fn drops_whether_its_workers_spin_or_sleep() {
        drop(Pool::new(Some(3), SPIN).unwrap());
        let pool = Pool::new(Some(3), SPIN).unwrap();
        assert_eq!(sum(&pool, 10), 55);
        while pool.shared.n_asleep.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        drop(pool);
    }
}
