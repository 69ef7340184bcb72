/* A small pool of threads for one process. Between operations of a step the workers spin for a few tens of microseconds, because
 * the next operation follows at once; after that they sleep, so that an idle engine leaves the processor to others.
 *
 * A run never waits for a worker that has not begun: a worker enters `inside` before it looks at the job, and the caller closes the
 * job when no chunk is left and then waits only for those inside. So a worker that the system has descheduled costs nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "headrace.h"

enum { SPIN_NANOSECONDS = 40000, MAX_THREADS = 256, LINE = 64 };

typedef struct {
    void *memory;
    size_t bytes;
} scratch;

typedef struct {
    hr_pool *pool;
    int index;
} worker_arg;

struct hr_pool {
    _Alignas(LINE) atomic_uint_fast64_t epoch; /* odd while a job is open */
    _Alignas(LINE) atomic_int_fast64_t next;
    _Alignas(LINE) atomic_int inside;
    _Alignas(LINE) atomic_int sleeping;
    hr_range run;
    void *job;
    int64_t total, grain;
    int threads, started;
    atomic_int stop;
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    pthread_t thread[MAX_THREADS];
    worker_arg argument[MAX_THREADS];
    scratch local[MAX_THREADS], shared[HR_SHARED_SLOTS];
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void take_chunks(hr_pool *pool, int thread) {
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&pool->next, pool->grain, memory_order_relaxed);
        if (begin >= pool->total) return;
        int64_t end = begin + pool->grain;
        pool->run(pool->job, begin, end < pool->total ? end : pool->total, thread);
    }
}

/* Wait until the epoch differs from `seen` (a job was opened or the pool stops); spin first, then sleep. */
static void wait_for_job(hr_pool *pool, uint64_t seen) {
    int64_t deadline = now() + SPIN_NANOSECONDS;
    for (int spins = 1; atomic_load(&pool->epoch) == seen; spins++) {
        relax();
        if (spins % 64 == 0 && now() > deadline) {
            pthread_mutex_lock(&pool->sleep_lock);
            atomic_fetch_add(&pool->sleeping, 1);
            while (atomic_load(&pool->epoch) == seen) pthread_cond_wait(&pool->wake, &pool->sleep_lock);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->sleep_lock);
            return;
        }
    }
}

static void announce(hr_pool *pool) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleeping) > 0) {
        /* The lock is taken so that a worker between its last look at the epoch and its wait cannot miss the signal. */
        pthread_mutex_lock(&pool->sleep_lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->sleep_lock);
    }
}

static void *work(void *argument) {
    hr_pool *pool = ((worker_arg *)argument)->pool;
    int thread = ((worker_arg *)argument)->index;
    uint64_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        atomic_fetch_add(&pool->inside, 1);
        seen = atomic_load(&pool->epoch);
        if (seen % 2) take_chunks(pool, thread);
        atomic_fetch_sub(&pool->inside, 1);
        if (!atomic_load(&pool->stop)) wait_for_job(pool, seen);
    }
    return NULL;
}

HR_API hr_pool *hr_pool_new(int threads) {
    hr_pool *pool = aligned_alloc(LINE, (sizeof(hr_pool) + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int i = 1; i < pool->threads; i++) {
        pool->argument[i] = (worker_arg){pool, i};
        /* Fewer threads than asked for still do all the work. */
        if (pthread_create(&pool->thread[i], NULL, work, &pool->argument[i])) break;
        pool->started++;
    }
    return pool;
}

HR_API void hr_pool_free(hr_pool *pool) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->epoch, 1); /* no job is open, and none will be: only the change matters */
    pthread_mutex_lock(&pool->sleep_lock);
    pool->total = 0;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->sleep_lock);
    for (int i = 1; i <= pool->started; i++) pthread_join(pool->thread[i], NULL);
    for (int i = 0; i < MAX_THREADS; i++) free(pool->local[i].memory);
    for (int i = 0; i < HR_SHARED_SLOTS; i++) free(pool->shared[i].memory);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->sleep_lock);
    free(pool);
}

void hr_parallel(hr_pool *pool, int64_t total, int64_t grain, hr_range run, void *job) {
    if (total <= 0) return;
    if (grain < 1) grain = 1;
    if (!pool->started || total <= grain) {
        run(job, 0, total, 0);
        return;
    }
    pool->run = run;
    pool->job = job;
    pool->total = total;
    pool->grain = grain;
    atomic_store(&pool->next, 0);
    announce(pool);
    take_chunks(pool, 0);
    atomic_fetch_add(&pool->epoch, 1); /* closed: who has not entered yet finds nothing to do */
    for (int spins = 1; atomic_load(&pool->inside); spins++) {
        relax();
        if (spins > 2000) sched_yield();
    }
}

int hr_threads(const hr_pool *pool) { return pool->started + 1; }

static void *grown(scratch *slot, size_t bytes) {
    if (slot->bytes < bytes) {
        size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        free(slot->memory);
        slot->memory = aligned_alloc(4096, size);
        slot->bytes = slot->memory ? size : 0;
    }
    return slot->memory;
}

void *hr_scratch(hr_pool *pool, int thread, size_t bytes) { return grown(&pool->local[thread], bytes); }
void *hr_shared(hr_pool *pool, enum hr_shared_slot slot, size_t bytes) { return grown(&pool->shared[slot], bytes); }
