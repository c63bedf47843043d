"""Eight virtual CPU devices for all tests, and no silent broadcasting between ranks."""

import gc
import inspect
import os

import jax
import jaxtyping
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
if jax.__version_info__ < (0, 11):  # later ones do not know the flag, and end at its sight
    # Without fused multiply-adds, which its other way to emit code would leave to chance, and with
    # a program in one piece, since another test has the other core.
    quick = " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    quick += " --xla_cpu_parallel_codegen_split_count=1"
    flags = os.environ.get("XLA_FLAGS", "").removesuffix(quick)  # which xdist's workers inherit
    os.environ["XLA_FLAGS"] = flags + quick
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # which programs would carry along
jax.devices()  # all are there before an example or the trainer asks for its own


jaxtyped = jaxtyping.jaxtyped


def jaxtyped_where_arrays_are(*, typechecker):
    """Checks functions whose annotations name arrays; pyright checks the others, in no time."""
    check = jaxtyped(typechecker=typechecker)

    def decorate(fn):
        is_without = inspect.isfunction(fn) and "Array" not in str(fn.__annotations__)
        return fn if is_without else check(fn)

    return decorate


jaxtyping.jaxtyped = jaxtyped_where_arrays_are


def pytest_configure(config):
    """Programs are compiled quickly and for the next runs too, also in processes of tests."""
    settings = {
        # Most of the time goes into compiling; what a compiler may reorder, it still may.
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(config.rootpath / ".pytest_cache" / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_collection_finish():
    """Tracing makes many objects and few cycles; the search for these took a seventh of the CPU."""
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """In the end pytest looks for garbage five times over, which once is enough for."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Notebooks take minutes; they run with `make test-all`."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("slow")


@pytest.fixture
def annotations_unchecked():
    """As for users, whose wrong arguments our own messages answer."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compiled(caplog):
    """A function that names the programs compiled since it was last called."""

    def names():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [m for m in messages if m.startswith("Finished XLA compilation")]

    with jax.log_compiles():
        yield names


def pytest_terminal_summary(terminalreporter):
    """Prints what trials of other trainers recorded, from other processes too."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "trial" and report.when == "call":
                terminalreporter.write_line(value)
