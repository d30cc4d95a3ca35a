// Calls of the system that fail, or at which the process dies, for tests of what a program leaves
// behind then.
//
// A shared library that stands before the C library: linked to a test program, or preloaded to any
// other (LD_PRELOAD). It watches calls that open, write, read, bring to the disk, rename, link and
// remove files in one folder, and lets the n-th of them fail. All others go through.
#ifndef KVZAP_IO_FAULTS_H
#define KVZAP_IO_FAULTS_H

#ifdef __cplusplus
extern "C" {
#endif

// Watches files below `folder` and the folder itself: an absolute path without symbolic links, the
// same text with which the program names files. The `call`-th watched call from now on, counted
// from 1 over all threads, gets `fault`; 0: none does, they are only counted.
//
// - eio, enospc: it fails with that error, having done nothing;
// - eintr: the same; calls that a signal does not interrupt go through;
// - short: it does half of what it was to write or read; other calls go through;
// - eio-on, enospc-on: from it on, all calls fail that write or bring to the disk, or that take
//   space;
// - kill: the process dies of SIGKILL instead;
// - torn: it does half of what it was to write, other calls all of it; then the process dies.
//
// Calls that this fault does not hit are counted all the same. close() closes even if it fails, as
// Linux does. Returns 0, or -1 if there is no such fault.
int kvzap_io_faults_arm(const char* folder, const char* fault, long call);
// Watches nothing any more.
void kvzap_io_faults_disarm(void);
// Watched calls since it was armed.
long kvzap_io_faults_calls(void);
// The first call that got the fault, as "pwrite FILE"; "" if none did. Valid until it is armed
// again.
const char* kvzap_io_faults_hit(void);

// Programs that do not know of this are told by the environment: KVZAP_IO_FAULTS_FOLDER, _FAULT and
// _CALL as above; _RANK: on that rank of MPI alone (as mpirun and srun tell it to the process);
// _LOG: a file outside of the folder, to which each watched call adds a line "N NAME FILE [FAULT]".

#ifdef __cplusplus
}
#endif

#endif
