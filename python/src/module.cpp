// The compiled part of the package kvzap.
#include <nanobind/nanobind.h>

#include <kvzap/config.hpp>

#include "llm.hpp"
#include "runtime.hpp"

NB_MODULE(_kvzap, module) {
  namespace python = kvzap::python;
  module.attr("has_mpi") = KVZAP_HAVE_MPI != 0;
  python::translate_errors();
  python::bind_pruning(module);
  python::bind_policy(module);
  python::bind_llm(module);
  python::bind_external_cache(module);
#if KVZAP_HAVE_DRIVERS
  python::bind_evaluate(module);
  python::bind_serve(module);
#endif
  // A ScorePolicy may be in a cycle with the function that refers to it.
  nanobind::set_leak_warnings(false);
  module.def("_end_running", &python::end_running);
  nanobind::module_::import_("atexit").attr("register")(module.attr("_end_running"));
}
