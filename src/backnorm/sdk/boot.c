/* How the library comes to a Python interpreter. Above it stand, from library.py: EXECUTABLE, LIBPYTHON, HOME_COMMAND,
 * search_paths (sys.path of the interpreter that built the home) and package_paths (those with backnorm's packages). */
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_STARTED, READY, FAILED };

static atomic_int state = NOT_STARTED;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char failure[2048];

static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure, sizeof failure, format, arguments);
    va_end(arguments);
    fprintf(stderr, "backnorm: %s\n", failure);
}

/* A forked child has the caller's thread alone: what Python's own os.fork does for it. */
static PyGILState_STATE at_fork;

static void before_fork(void)
{
    at_fork = PyGILState_Ensure();
    PyOS_BeforeFork();
}

static void after_fork_in_parent(void)
{
    PyOS_AfterFork_Parent();
    PyGILState_Release(at_fork);
}

static void after_fork_in_child(void)
{
    PyOS_AfterFork_Child();
    PyGILState_Release(at_fork);
}

static int start_interpreter(void)
{
    const char *chosen = getenv("BACKNORM_PYTHON");
    int is_chosen = chosen && *chosen;
    const char *executable = is_chosen ? chosen : EXECUTABLE;
    if (access(executable, X_OK) != 0) {
        if (is_chosen)
            fail("BACKNORM_PYTHON must name a Python executable; got %s", executable);
        else
            fail("the Python this home was built with, %s, is gone: run `%s` again or set BACKNORM_PYTHON", executable,
                 HOME_COMMAND);
        return -1;
    }
    /* Extension modules look for Python's symbols among the global ones, also where this library was loaded locally. */
    dlopen(LIBPYTHON, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);

    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.program_name, executable);
    for (const char *const *folder = search_paths; *folder && !is_chosen && !PyStatus_Exception(status); folder++) {
        wchar_t *text = Py_DecodeLocale(*folder, NULL);
        config.module_search_paths_set = 1;
        status = text ? PyWideStringList_Append(&config.module_search_paths, text) : PyStatus_NoMemory();
        PyMem_RawFree(text);
    }
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) {
        fail("Python did not start as %s: %s; it must be Python %d.%d", executable,
             status.err_msg ? status.err_msg : "unknown reason", PY_MAJOR_VERSION, PY_MINOR_VERSION);
        return -1;
    }
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    PyEval_SaveThread();
    return 0;
}

/* What the running interpreter does not find by itself it finds where the one that built the home did. */
static int add_paths(void)
{
    PyObject *path = PySys_GetObject("path");
    for (const char *const *folder = package_paths; *folder; folder++) {
        PyObject *text = PyUnicode_DecodeFSDefault(*folder);
        int present = text && path ? PySequence_Contains(path, text) : -1;
        int added = present == 0 ? PyList_Append(path, text) : present;
        Py_XDECREF(text);
        if (added < 0) {
            PyErr_Print();
            fail("sys.path could not be extended by %s", *folder);
            return -1;
        }
    }
    return 0;
}

static int join_interpreter(void)
{
    int major = 0, minor = 0;
    sscanf(Py_GetVersion(), "%d.%d", &major, &minor);
    if (major != PY_MAJOR_VERSION || minor != PY_MINOR_VERSION) {
        fail("this home was built for Python %d.%d and was loaded into Python %d.%d: build one with that Python",
             PY_MAJOR_VERSION, PY_MINOR_VERSION, major, minor);
        return -1;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    int ready = add_paths();
    PyGILState_Release(gil);
    return ready;
}

static int is_host; /* the interpreter is ours */

static void boot(void)
{
    is_host = !Py_IsInitialized();
    int ready = is_host ? start_interpreter() : join_interpreter();
    if (ready == 0 && cffi_start_python() != 0) {
        fail("the Python side did not start; its own message stands above. If backnorm is missing or has changed, run"
             " `%s`", HOME_COMMAND);
        ready = -1;
    }
    atomic_store_explicit(&state, ready == 0 ? READY : FAILED, memory_order_release);
}

/* Whether this thread holds the interpreter's lock. PyGILState_Check says yes to all, once there was a second
 * interpreter. Before Python 3.12 the current state is the process's: that of whichever thread runs Python at this
 * moment. If it is not the thread's first one, it may still be the thread's own, of another interpreter. */
static int holds_lock(void)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030C0000
    return _PyThreadState_UncheckedGet() != NULL;
#else
    PyThreadState *own = PyGILState_GetThisThreadState(), *running = _PyThreadState_UncheckedGet();
    return own && running && (own == running || running->thread_id == PyThread_get_thread_ident());
#endif
}

/* Whether Python can be called; the first call starts it. */
static int ready(void)
{
    if (atomic_load_explicit(&state, memory_order_acquire) == NOT_STARTED) {
        /* A caller that holds the interpreter's lock lets go of it: who boots meanwhile needs it. */
        PyThreadState *held = Py_IsInitialized() && holds_lock() ? PyEval_SaveThread() : NULL;
        pthread_once(&once, boot);
        if (held)
            PyEval_RestoreThread(held);
    }
    /* A joined interpreter may have ended: destructors run after it. */
    return atomic_load_explicit(&state, memory_order_acquire) == READY && Py_IsInitialized();
}

/* Memory that `delete[]` of C++ releases. */
extern void *_ZnamRKSt9nothrow_t(size_t size, const void *nothrow);
extern const char _ZSt7nothrow;

static int64_t *new_array(size_t count)
{
    return _ZnamRKSt9nothrow_t(count * sizeof(int64_t), &_ZSt7nothrow);
}

/* exit() takes native libraries down; it must not find queued work in the middle of them. */
static void finish_work(void)
{
    if (Py_IsInitialized())
        py_finish_work();
}

static void finish_work_at_exit(void)
{
    if (is_host)
        atexit(finish_work);
}
