// Reads a text with a pruned cache and asks about it: on one rank, or on many under mpirun.
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <kvzap/engine/session.hpp>

int main(int argc, char** argv) {
#if KVZAP_HAVE_MPI
  MPI_Init(&argc, &argv);
#endif
  {
    const Kokkos::ScopeGuard kokkos(argc, argv);
    const auto ranks = kvzap::Communicator::world();
    const std::string models = KVZAP_INPUTS "/models/";
    const auto pruning = kvzap::Pruning::kvzap(models + "kvzap-mlp-recall-4m").threshold(-4);
    kvzap::Session session(models + "recall-4m", pruning, ranks);
    session.read("One of the special magic numbers for victor is: 4467. The windy jacket moves.");
    const std::string answer = session.ask("\n\nWhat is the special magic number for victor?");
    const bool is_right = answer.find("4467") != std::string::npos;
    if (ranks.is_root()) std::printf("%s %s\n", answer.c_str(), is_right ? "right" : "WRONG");
  }
#if KVZAP_HAVE_MPI
  MPI_Finalize();
#endif
}
