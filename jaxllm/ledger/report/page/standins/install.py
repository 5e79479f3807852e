"""Installation of the stand-ins in `sys.modules` of the browser's Python."""

from jaxllm.ledger.report.page.standins.library import (
    bisect_left,
    cache,
    cached_property,
    closest,
    deepcopy,
    dumps,
    loads,
    lru_cache,
    partial,
)
from jaxllm.ledger.report.page.standins.names import _Module, module
from jaxllm.ledger.report.page.standins.records import (
    MISSING,
    asdict,
    dataclass,
    field,
    fields,
    is_dataclass,
    make_dataclass,
    replace,
)
from jaxllm.ledger.report.page.standins.trees import DType, leaves, leaves_with_path, map_with_path, tree_map


def install(absent: list[str], jax_version: tuple[int, ...], environment: dict[str, str]) -> None:
    """Installs the stand-in modules, and a placeholder for each absent module.

    Args:
      absent: names of modules that the page does not embed.
      jax_version: value of `jax.__version_info__`.
      environment: variables that the closed forms read, from the process that wrote the page.
    """
    for name in absent:
        if name not in ("math", "sys"):
            module(name)
    module(
        "dataclasses",
        MISSING=MISSING,
        dataclass=dataclass,
        field=field,
        fields=fields,
        replace=replace,
        make_dataclass=make_dataclass,
        is_dataclass=is_dataclass,
        asdict=asdict,
    )
    module(
        "typing",
        TYPE_CHECKING=False,
        get_origin=lambda annotation: getattr(annotation, "__origin__", None),
        get_args=lambda annotation: getattr(annotation, "__args__", ()),
    )
    module("types", UnionType=type(int | None), ModuleType=_Module)
    module("functools", cache=cache, lru_cache=lru_cache, cached_property=cached_property, partial=partial)
    module("json", dumps=dumps, loads=loads)
    module("collections.abc", Mapping=dict, Sequence=list | tuple)
    module("os", environ=environment)
    module("copy", copy=lambda thing: replace(thing), deepcopy=deepcopy)
    module("bisect", bisect_left=bisect_left)
    module("difflib", get_close_matches=closest)
    module("jax", __version_info__=jax_version)
    module("jax.tree", leaves=leaves, map=tree_map)
    module("jax.tree_util", tree_leaves_with_path=leaves_with_path, tree_map_with_path=map_with_path)
    names = ("float32", "bfloat16", "float16", "int32", "uint32", "int8")
    module("jax.numpy", dtype=DType, **{name: DType(name) for name in names})
